"""Libraries measured in turn, row by row, by processes that stay: whatever else the machine does meets all alike.

Every process to be measured connects to a socket of ours, in a folder that only this user can enter, says whose it is,
and waits there for its turn with each row.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from overlap.cli.bench.cases import Case
from overlap.cli.bench.measuring import Result, summarize_case
from overlap.cli.bench.sampling import Sampling
from tests.benchmarks.children import read_json_lines, start
from tests.benchmarks.versus.contenders import Contender, ContenderResult, ContenderUnavailableError, Running, running

from .assignment import AssignmentInTurn
from .layout import MEMBER, ProcessLayout

_OURS = "overlap"
_LOOK_S = 0.5  # how often to ask, while processes start, whether all of them still live
_LIMIT_S = 600.0  # for a row, absolute


class Turns:
    """The socket at which processes wait.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="overlap-bench-")
        self.path = str(Path(self._folder.name, "turns"))
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.path)
        self._door.listen(64)
        self._waiting: dict[str, list[socket.socket]] = {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let all go on: those that still wait end."""
        for connection in [self._door, *(one for each in self._waiting.values() for one in each)]:
            connection.close()
        self._folder.cleanup()

    def admit(self, name: str, count: int, live: Callable[[], bool]) -> None:
        """Wait until so many processes of a name have come, or not all of them live any more."""
        self._door.settimeout(_LOOK_S)
        while len(self._waiting.get(name, ())) < count and live():
            try:
                connection, _ = self._door.accept()
            except TimeoutError:
                continue
            connection.settimeout(_LIMIT_S)
            self._waiting.setdefault(connection.recv(64).decode(), []).append(connection)

    def let(self, name: str) -> None:
        """Let the processes of a name measure their next row, and wait until they have; one that ends has."""
        for connection in self._waiting.get(name, ()):
            try:
                connection.sendall(b"g")
            except OSError:
                continue
        for connection in self._waiting.get(name, ()):
            try:
                connection.recv(1)
            except OSError:
                continue


def measure_in_turn(
    cases: Sequence[Case],
    sampling: Sampling,
    layout: ProcessLayout,
    contenders: Sequence[Contender],
    *,
    algorithm: str | None = None,
    say: Callable[[str], None] = lambda reason: None,
) -> Iterator[Result | list[ContenderResult]]:
    """Measure each row on our processes and right after that on those of each library.

    Yields each row of ours when it is known, and last what the libraries measured.

    Args:
        cases: The rows; they differ in their counts only.
        sampling: How often.
        layout: Where our ranks are: on several nodes.
        contenders: The libraries.
        algorithm: Of ours; None: the cheapest.
        say: Takes why a library could not be measured.

    Raises:
        OverlapError: If a process of ours fails.
    """
    with Turns() as turns, ExitStack() as stack:
        ours = AssignmentInTurn(cases=cases, sampling=sampling, turns=turns.path, name=_OURS)
        others: dict[str, Running] = {}
        for contender in contenders:
            asked = AssignmentInTurn(cases=cases, sampling=sampling, turns=turns.path, name=contender.name)
            try:
                others[contender.name] = stack.enter_context(running(contender, asked))
            except ContenderUnavailableError as reason:
                say(str(reason))
        options = layout.options(cases[0].ranks, rows=len(cases), algorithm=algorithm)
        process = start(options, [MEMBER, ours.to_json()], variables=layout.variables)
        told = read_json_lines([process])
        turns.admit(_OURS, layout.processes, lambda: process.poll() is None)
        for name, other in others.items():
            turns.admit(name, cases[0].ranks, partial(getattr, other, "live"))
        for case in cases:
            turns.let(_OURS)
            yield summarize_case(case, sampling, next(told)["told"])
            for name in others:
                turns.let(name)
        yield list(_finished(others.values(), say))
        next(told, None)  # which sees ours end


def _finished(others: Iterable[Running], say: Callable[[str], None]) -> Iterator[ContenderResult]:
    for other in others:
        try:
            yield other()
        except ContenderUnavailableError as reason:
            say(str(reason))
