"""Record of a run: every operation that a rank has issued, in order, with its line. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..waits.ends import CallRecord, End, EndState, RankView, Seen
from ..waits.wording import end_title


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A fault that was found in a run."""

    kind: str  # Such as "cycle": one of `waits.judge.Kind`, or a fault that a run survived
    text: str  # For people, with ranks, operations and lines
    ranks: tuple[int, ...] = ()  # The ranks at fault first
    lines: tuple[str, ...] = ()  # Lines of the program, as "file.py:41"; the lines at fault first

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True, kw_only=True)
class Issue:
    """One operation of one rank."""

    rank: int
    index: int  # Its number among the operations of its rank
    call: CallRecord  # Its form is "" until its input exists; its site is "file.py:41"
    seq: int  # Number of the operation under `call.key`, the same on all its ranks
    issued_ns: int
    ended_ns: int | None = None  # None: it never ended
    failed: bool = False
    waited_ns: int | None = None  # When the program's wait for it ended; None: the program never waited for it
    thread: int = 0  # The rank's thread that issued it: 0 is the first one, others save checkpoints
    lost: bool = False  # Whether a fault stopped the rank before other ranks received anything of it
    awaited: bool = False  # Whether the program waits for it, or has waited
    ahead: bool = False  # Whether a strategy has issued it in advance, for a use that may never happen
    randomness: str = ""  # Digest of the state of the rank's random numbers
    dropped_by: str = ""  # Code of torch that has issued it and never waits for it

    @property
    def unfinished(self) -> bool:
        """Whether the operation never ended, or failed."""
        return self.ended_ns is None or self.failed

    @property
    def end(self) -> End:
        """The operation in the form that the judge of waits takes."""
        state = EndState.WAITING if self.ended_ns is None else EndState.DONE
        state = EndState.FAILED if self.failed else state
        return End(
            rank=self.rank, call=self.call, seq=self.seq, state=state, issued_ns=self.issued_ns, done_ns=self.ended_ns,
            awaited=self.awaited or None,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """Name of the operation and its line, such as "send #0 to rank 1 (train.py:41)"."""
        return end_title(self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """A rank's call of `new_group`, for a group that it need not be in."""

    rank: int  # The rank that called
    ranks: tuple[int, ...]  # Members of the group
    line: str
    alone: bool = False  # Whether ranks outside of the group need not call


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """State of a rank's weights after one update."""

    rank: int
    step: int  # Number of the update; 0: before the first one
    digests: dict[str, str]  # By name of a weight; the name of a shard ends with its position, " [part 0, 1]"
    without_gradient: tuple[str, ...] = ()  # Names of weights that had no gradient in the update
    line: str = ""  # Line of the update
    joins: int = 0  # Number of `Join` contexts (uneven inputs) that ended before; each restarts the count of updates
    settings: tuple[dict[str, str], ...] = ()  # Settings of the optimizer's parameter groups, such as {"lr": "0.1"}
    randomness: str = ""  # Digest of the state of the rank's random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """Use of a tensor by a program while an operation on its memory was under way."""

    rank: int
    issue: Issue  # The operation
    line: str  # Line of the use
    how: str  # "read" or "written"
    by: str  # The function of PyTorch


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter, or a part of one, that a rank holds."""

    digest: str
    trained: bool
    members: tuple[int, ...] = ()  # Ranks that should hold the same, by PyTorch's placements and groups; (): unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstForward:
    """A rank's weights at its first forward, and the first input that meets a weight."""

    rank: int
    line: str
    weights: dict[str, Held]  # By name
    digest: str  # Digest of the input
    members: tuple[int, ...] = ()  # Ranks that should have the same input, by PyTorch's placements; (): unknown
    parameter: str = ""  # Name of the parameter that the input meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """An operation on parameters (broadcast) or their gradients (all_reduce)."""

    issue: Issue
    names: tuple[str, ...]  # Names of the parameters


@dataclass(slots=True, kw_only=True)
class Record:
    """All that was recorded of a run."""

    size: int
    issues: list[Issue] = field(default_factory=list)  # In the order in which they were issued
    group_calls: list[GroupCall] = field(default_factory=list)
    weights: list[WeightRecord] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    first_forwards: list[FirstForward] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)  # Up to the first update
    activations: dict[tuple[tuple[int, ...], str], None] = field(default_factory=dict)  # (ranks that add up, line)
    troubles: dict[int, BaseException] = field(default_factory=dict)  # By rank: last error of one of its operations
    stopped: set[int] = field(default_factory=set)  # Ranks that a fault has stopped
    left: dict[int, str] = field(default_factory=dict)  # By rank whose program has ended: how, "" if without error
    places: dict[int, str] = field(default_factory=dict)  # By unfinished rank: its line when the run was ended
    leaks: list[tuple[int, str, str]] = field(default_factory=list)  # (rank, clause on what it left, line or "")
    late_files: dict[int, str] = field(default_factory=dict)  # By rank that missed a file: clause on its writer
    peak_bytes: dict[int, int] = field(default_factory=dict)  # By rank: largest memory of tensors at a time

    def issues_of(self, rank: int) -> list[Issue]:
        """Return the operations of a rank, in order."""
        return [issue for issue in self.issues if issue.rank == rank]

    def views(self, stopped: Seen = Seen.LEFT) -> list[RankView]:
        """Return the views of all ranks, for the judge of waits.

        Args:
            stopped: State to give to ranks that a fault has stopped.
        """
        everyone = tuple(range(self.size))
        ends: dict[int, list[End]] = {rank: [] for rank in everyone}
        for issue in self.issues:
            if not issue.lost:
                ends[issue.rank].append(issue.end)
        views = []
        for rank in everyone:
            seen, how, site = Seen.WAITS, self.left.get(rank, ""), self.places.get(rank, "")
            if rank in self.stopped:
                seen = stopped
            elif rank in self.left and (how or all(end.state is EndState.DONE for end in ends[rank])):
                seen = Seen.LEFT  # its program has ended, and its tasks wait for no operation
            views.append(RankView(rank=rank, seen=seen, ends=tuple(ends[rank]), site=site, how=how))
        return views

    def lines(self) -> Iterator[str]:
        """Yield the trace: one line for each operation, in order; the same seed gives the same text."""
        for issue in self.issues:
            outcome = "failed" if issue.failed else f"{issue.ended_ns}"
            ended = "never" if issue.ended_ns is None else outcome
            call = issue.call
            what = f"{call.name or ('send/recv' if call.is_message else call.op)}({call.form})"
            yield f"{issue.issued_ns} rank {issue.rank} {issue.title} {what} {call.nbytes} B -> {ended}"
