"""Gang: the processes of a world that an engine starts together and ends together; its description and its outcome."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ..config import RunConfig
from ..errors import OverlapError, UsageError, in_one_line
from ..processes.place import LONGEST_JOB
from ..version import version
from .pickling import Pickling

# Room in the name of a job for what connections put after it.
LONGEST_NAME = LONGEST_JOB - 37


_PICKLED = "pass values that can be pickled, and make the others in the program"


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """A program and its settings, as every process of a gang is given them."""

    engine: str  # The name of the engine, for messages
    job: str  # The name of the job
    members: int  # How many processes
    ranks_each: int  # Ranks of each
    config: RunConfig  # Settings of the run
    program: bytes = field(repr=False)  # The pickled program and its arguments
    import_path: Sequence[str] = ()  # Folders that the driver imports from first
    attempt: int = 0  # How often the gang has been started before
    version: str = field(default_factory=lambda: own_version())  # Version of overlap and Python on the driver
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # Tells the job's folders from all others

    @property
    def label(self) -> str:
        """The name of this attempt; members of different attempts, or of jobs of one name, never meet."""
        return f"{self.job}-{self.token}.{self.attempt}"

    def again(self, attempt: int) -> Self:
        """Return the description of another attempt."""
        return replace(self, attempt=attempt)

    def ranks(self, member: int) -> range:
        """Return the ranks of a member."""
        return range(member * self.ranks_each, (member + 1) * self.ranks_each)

    def member_of(self, rank: int) -> int:
        """Return the member that has a rank."""
        return rank // self.ranks_each


def own_version() -> str:
    """Return the versions that all processes of a gang must share."""
    return f"overlap {version()} on Python {sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """End of one process of a gang, as the process reports it."""

    member: int  # Its index
    machine: str = ""  # Names the machine, equal for all processes that see its files
    results: Sequence[bytes] | None = None  # The pickled result of each of its ranks; None: it has failed
    error: OverlapError | None = None  # Its failure; None: it has not failed, or was stopped
    spans: bytes = b""  # Its part of the timeline, if one is kept
    files: Mapping[str, bytes] = field(default_factory=dict)  # Its flight records, by name
    latest: int | None = None  # The newest complete state or checkpoint that its machine sees
    begun_s: float = 0.0  # When its world lived, since 1970; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class GangOutcome:
    """The end of one attempt of a gang."""

    ends: Mapping[int, MemberEnd]  # By member, in the order of their reports
    lost: Mapping[int, str]  # Reasons of members without a report, as clauses of the engine
    files: Mapping[str, bytes] = field(default_factory=dict)  # Flight records of these, by name


def describe_gang(
    engine: str,
    main: Callable[..., Awaitable[object]],
    args: tuple[object, ...],
    config: RunConfig,
    *,
    ranks_each: int,
    argument: str,
    name: str | None,
    pickling: Pickling,
    import_path: Sequence[str],
) -> GangSpec:
    """Return the description of a gang, after a check of the user's arguments.

    `argument` is the name of `ranks_each` in the engine's `run`; without a name of the job, it gets a new one.

    Raises:
        UsageError: If a value is invalid, or the program cannot be sent.
    """
    if not isinstance(ranks_each, int) or isinstance(ranks_each, bool) or ranks_each < 1:
        raise UsageError(f"{argument}: expected a positive integer, got {ranks_each!r}")
    ranks = config.ranks
    if ranks is None:
        raise UsageError(f"ranks: expected their number, which {engine} cannot know; pass ranks=N")
    if ranks % ranks_each:
        raise UsageError(f"ranks: {ranks} cannot be divided into {argument}={ranks_each}; choose a multiple")
    if name is not None and (not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME):
        raise UsageError(f"name: expected 1 to {LONGEST_NAME} printable characters, got {name!r}")
    if config.virtual is not None:
        raise UsageError(
            f"clock: {engine} runs ranks in real time; for virtual time call overlap.run, which needs one process"
        )
    return GangSpec(
        engine=engine,
        job=name or f"{engine.lower()}-{secrets.token_hex(4)}",
        members=ranks // ranks_each,
        ranks_each=ranks_each,
        config=config,
        program=pickle_program(main, args, pickling),
        import_path=tuple(import_path),
    )


def pickle_program(main: object, args: tuple[object, ...], pickling: Pickling) -> bytes:
    """Return the bytes of a program and its arguments; a UsageError names the one that cannot be pickled."""
    try:
        return pickling.dumps((main, args))
    except Exception as error:
        first_error = error
    for name, value in (("main", main), *((f"argument {index + 1} of main", arg) for index, arg in enumerate(args))):
        try:
            pickling.dumps(value)
        except Exception as error:
            raise UsageError(f"{name}: cannot be sent to other processes: {in_one_line(error)}; {_PICKLED}") from error
    raise UsageError(
        f"main: cannot be sent to other processes: {in_one_line(first_error)}; {_PICKLED}"
    ) from first_error
