"""Starts another library's ranks as processes, one library at a time, and reads what they measured."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import ml_dtypes

from overlap import OverlapError, UsageError
from overlap.cli.bench.sampling import Times, slowest_times
from tests.benchmarks.children import Child, environment

from .assignment import AssignmentInTurn

TIMEOUT_S = 600.0
"""Absolute, for all rows of one library: gloo needs about a minute for the slowest table here."""

_OPS = ("sum", "prod", "max", "min")


class ContenderUnavailableError(OverlapError):
    """A library cannot be measured here; the message says why and, if something is missing, how to install it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A library to compare with."""

    name: str  # As `--vs` takes it
    module: str  # What must be installed
    packages: str  # What pip installs for that
    program: str  # The module that each of its ranks runs
    # Starts all ranks, given the size of the world, the interpreter's arguments, and where errors go. The first process
    # returned is the one whose stdout tells the result.
    start: Callable[[int, Sequence[str], IO[bytes]], list[Child]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """What a library measured."""

    name: str  # Of the contender
    version: str  # Library and version
    times: tuple[Times, ...]  # One for each row, in order
    wrong: tuple[int, ...]  # Elements that were not as expected, for each row


def contenders_named(text: str) -> list[Contender]:
    """Read a list such as `gloo,mpi`.

    Raises:
        UsageError: If a name is unknown.
    """
    names = text.split(",")
    for name in names:
        if name not in CONTENDERS:
            raise UsageError(f"--vs: {name!r} is unknown; known are {', '.join(CONTENDERS)}")
    return [CONTENDERS[name] for name in dict.fromkeys(names)]


def measure_contender(contender: Contender, assignment: AssignmentInTurn) -> ContenderResult:
    """Run a library's ranks to their end and return what they measured.

    Raises:
        ContenderUnavailableError: If the library is not installed, or does not finish properly.
    """
    with running(contender, assignment) as result:
        return result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A library's ranks while they run; call it to wait for what they measured."""

    contender: Contender  # The library
    assignment: AssignmentInTurn  # What they are to measure
    ranks: Sequence[Child]  # The processes that were started for them
    errors: IO[bytes]  # Where their errors go

    @property
    def live(self) -> bool:
        """Whether none of them has ended."""
        return all(rank.poll() is None for rank in self.ranks)

    def __call__(self) -> ContenderResult:
        """Wait for their end.

        Raises:
            ContenderUnavailableError: If that is not a proper one.
        """
        return _result(self.contender, _told(self.contender, self.ranks, self.errors), self.assignment)


@contextmanager
def running(contender: Contender, assignment: AssignmentInTurn) -> Iterator[Running]:
    """Have a library's ranks run for the length of a ``with``.

    Raises:
        ContenderUnavailableError: If the library is not installed.
    """
    if find_spec(contender.module) is None:
        raise ContenderUnavailableError(
            f"{contender.name}: {contender.module} is not installed: pip install {contender.packages}"
        )
    first = assignment.cases[0]
    if first.op not in _OPS or hasattr(ml_dtypes, first.dtype.name):
        raise ContenderUnavailableError(f"{contender.name}: has no {first.op} of {first.dtype.name}")
    command = ["-m", contender.program, assignment.to_json()]
    with ExitStack() as stack:
        errors = stack.enter_context(TemporaryFile())
        ranks = contender.start(first.ranks, command, errors)
        for rank in ranks:
            stack.callback(rank.end)
        yield Running(contender=contender, assignment=assignment, ranks=ranks, errors=errors)


def _told(contender: Contender, ranks: Sequence[Child], errors: IO[bytes]) -> bytes:
    try:
        told, _ = ranks[0].communicate(timeout=TIMEOUT_S)
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise ContenderUnavailableError(f"{contender.name}: not finished after {TIMEOUT_S:g} s, given up") from None
    if any(codes):
        errors.seek(0)
        # The first rank to fail writes first; the others only lose their connections.
        reason = re.search(r"\w*(?:Error|Exception): .*", errors.read().decode(errors="replace"))
        raise ContenderUnavailableError(
            f"{contender.name}: failed: {reason[0].strip() if reason else f'exit codes {codes}'}"
        )
    return told


def _result(contender: Contender, told: bytes, assignment: AssignmentInTurn) -> ContenderResult:
    answer = json.loads(told.splitlines()[-1])
    rows = answer["rows"]
    batches = [assignment.sampling.operations_per_sample(case.size_bytes) for case in assignment.cases]
    return ContenderResult(
        name=contender.name,
        version=answer["version"],
        times=tuple(slowest_times(row["samples_ns"], batch=batch) for row, batch in zip(rows, batches, strict=True)),
        wrong=tuple(row["wrong"] for row in rows),
    )


def _start_gloo(ranks: int, command: Sequence[str], errors: IO[bytes]) -> list[Child]:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    return [
        _spawn([sys.executable, *command], errors, world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def _start_mpi(ranks: int, command: Sequence[str], errors: IO[bytes]) -> list[Child]:
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise ContenderUnavailableError("mpi: there is no mpiexec: pip install mpich")
    # Without `-m mpi4py` a rank that raises leaves the others waiting for ever.
    return [_spawn([mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", *command], errors, {})]


def _spawn(command: Sequence[str], errors: IO[bytes], variables: Mapping[str, str]) -> Child:
    environ = environment() | {"OMP_NUM_THREADS": "1"} | dict(variables)
    return Child(command, environ, errors=errors)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


CONTENDERS = {
    "gloo": Contender(
        name="gloo", module="torch", packages="torch", program=f"{__package__}.gloo_rank", start=_start_gloo
    ),
    "mpi": Contender(
        name="mpi", module="mpi4py", packages="mpi4py mpich", program=f"{__package__}.mpi_rank", start=_start_mpi
    ),
}
