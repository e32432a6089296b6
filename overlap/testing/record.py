"""Record of a run: every operation that a rank has issued, in order, with the line that did it. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..waits.ends import CallRecord, End, EndState, RankView, Seen
from ..waits.wording import title


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is wrong."""

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
    seq: int  # Its number where its ends meet
    issued_ns: int
    ended_ns: int | None = None  # None: it never ended
    failed: bool = False
    waited_ns: int | None = None  # When its program had waited for it; None: it never did
    thread: int = 0  # Its rank's thread: 0 is the first one, others save checkpoints
    lost: bool = False  # Whether a fault has stopped its rank before anybody heard of it
    awaited: bool = False  # Whether its program waits for it, or has
    ahead: bool = False  # Whether a strategy has issued it, as ahead of a use that may never come
    randomness: str = ""  # Digest of the state of the rank's random numbers
    dropped_by: str = ""  # Code of torch that has issued it and keeps nothing to wait for

    @property
    def unfinished(self) -> bool:
        """Whether the operation never ended, or failed."""
        return self.ended_ns is None or self.failed

    @property
    def end(self) -> End:
        """The operation as an end for the judge of waits."""
        state = EndState.FAILED if self.failed else EndState.WAITING if self.ended_ns is None else EndState.DONE
        return End(
            rank=self.rank, call=self.call, seq=self.seq, state=state, issued_ns=self.issued_ns, done_ns=self.ended_ns,
            awaited=self.awaited or None,
        )  # fmt: skip

    @property
    def title(self) -> str:
        """Name of the operation and its line, such as "send #0 to rank 1 (train.py:41)"."""
        return title(self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """A rank's call of `new_group`, for a group that it need not be in."""

    rank: int
    ranks: tuple[int, ...]
    line: str
    alone: bool = False  # Ranks outside of the group need not help


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """Digests of a rank's weights after one update; part of a weight has its position in its name."""

    rank: int
    step: int
    digests: dict[str, str]
    without_gradient: tuple[str, ...] = ()
    line: str = ""  # of the update
    joins: int = 0  # number of contexts of uneven inputs that ended before; each restarts the count of updates
    settings: tuple[dict[str, str], ...] = ()  # of the optimizer's groups of parameters, such as {"lr": "0.1"}
    randomness: str = ""  # Digest of the state of the rank's random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Touch:
    """A tensor that a program has used while an operation was under way."""

    rank: int
    issue: Issue
    line: str
    how: str  # "read" or "written"
    by: str  # The function of PyTorch


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter, or part of one, that a rank holds."""

    digest: str
    trained: bool
    members: tuple[int, ...] = ()  # Ranks that hold the same, as far as PyTorch's objects say


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstForward:
    """Digests of a rank's weights, and of the input that meets one of them first."""

    rank: int
    line: str
    weights: dict[str, Held]
    digest: str  # of the input
    members: tuple[int, ...] = ()  # Ranks to which PyTorch's objects say that the input is the same
    parameter: str = ""  # that the input meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """An operation on parameters (broadcast) or gradients (all_reduce)."""

    issue: Issue
    names: tuple[str, ...]


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
    activations: dict[tuple[tuple[int, ...], str], None] = field(
        default_factory=dict
    )  # Ranks that add up, and the line
    troubles: dict[int, BaseException] = field(default_factory=dict)  # Last error of an operation that a rank was given
    stopped: set[int] = field(default_factory=set)  # Ranks that a fault has stopped
    left: dict[int, str] = field(default_factory=dict)  # Ranks whose program has ended, and how: "" is well
    places: dict[int, str] = field(default_factory=dict)  # Lines at which ranks stood when the run was ended
    leaks: list[tuple[int, str, str]] = field(default_factory=list)  # The rank, what it has left, the line if known
    late_files: dict[int, str] = field(default_factory=dict)  # Who writes the file that a rank has missed
    peak_bytes: dict[int, int] = field(default_factory=dict)  # Memory of tensors, by rank

    def of(self, rank: int) -> list[Issue]:
        """Return the operations of a rank, in order."""
        return [issue for issue in self.issues if issue.rank == rank]

    def views(self, stopped: Seen = Seen.LEFT) -> list[RankView]:
        """Return the views of all ranks, for the judge of waits; `stopped` are ranks that a fault has stopped."""
        everyone = tuple(range(self.size))
        ends: dict[int, list[End]] = {rank: [] for rank in everyone}
        for issue in self.issues:
            if not issue.lost:
                ends[issue.rank].append(issue.end)
        return [
            RankView(
                rank=rank,
                seen=stopped if rank in self.stopped else Seen.LEFT if self._has_left(ends[rank], rank) else Seen.WAITS,
                ends=tuple(ends[rank]),
                site=self.places.get(rank, ""),
                how=self.left.get(rank, ""),
            )
            for rank in everyone
        ]

    def _has_left(self, ends: Sequence[End], rank: int) -> bool:
        """Whether a rank's program has ended, and its tasks wait for no operation."""
        return rank in self.left and (bool(self.left[rank]) or all(end.state is EndState.DONE for end in ends))

    def lines(self) -> Iterator[str]:
        """Yield the trace: one line for each operation, in order; the same seed gives the same text."""
        for issue in self.issues:
            ended = "never" if issue.ended_ns is None else "failed" if issue.failed else f"{issue.ended_ns}"
            call = issue.call
            what = f"{call.name or ('send/recv' if call.is_message else call.op)}({call.form})"
            yield f"{issue.issued_ns} rank {issue.rank} {issue.title} {what} {call.nbytes} B -> {ended}"
