"""Choice of buckets: recorded steps are replayed on the virtual clock with other sizes and orders.

The what-if of timelines (`timeline.replay`) cannot part gradients that were recorded in one bucket. Of six programs in
virtual time, the steps of its choice were up to 11 % longer than the shortest, and those of this one at most 0.7 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeAlias

import trio

from ..config import ignoring_environment
from ..errors import UsageError
from ..front import run
from ..runtime.future import Future
from ..runtime.memory.arrays import metadata
from ..runtime.rank import Rank
from ..simulation.simulated_backend import Virtual
from ..timeline.measure.intervals import Merged, intersect, length, merge
from ..timeline.span import Span
from ..units import format_bytes
from .buckets.plan import GradientBucket
from .models import TrainableModel
from .work import nothing

if TYPE_CHECKING:
    from .tree import Array

Size: TypeAlias = int | None
"""Of a full bucket, in bytes; None for the default rule."""

SIZES: tuple[Size, ...] = (None, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 25 << 20, 1 << 27)
CANDIDATES: tuple[tuple[Size, Literal["forward", "fifo"]], ...] = tuple(
    (size, order) for order in ("forward", "fifo") for size in SIZES
)

RECORDED = 5  # steps; the first two are warm-up
_STEPS = 5  # replayed; the last two count
_CHUNK_BYTES = 256 << 10  # after which something more urgent may overtake
_SMALL_BYTES = 4096  # messages up to this size take the latency alone
_NEAR_BEST = 1.01  # candidates within 1 % of the best count as equal, so that noise does not choose


MakeModel: TypeAlias = Callable[..., TrainableModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecording:
    """The times of a step that do not depend on buckets."""

    sizes: Mapping[str, tuple[int, str]]  # Elements and dtype of each parameter, by name, in the order of forward
    forward_s: float  # Time of all layers and of the loss
    # In the order in which there are gradients: of which parameter, and how long that takes after the one before it.
    backward_s: tuple[tuple[str, float], ...]
    latency_s: float  # Time of a small message
    seconds_per_byte: float  # Time of a byte on the busy wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best candidate, and the time of the defaults."""

    candidate: int  # Its index in `CANDIDATES`
    step_s: float  # Time of a step, in the replay
    default_s: float  # Time of a step with the defaults, in the replay

    def __str__(self) -> str:
        size, order = CANDIDATES[self.candidate]
        buckets = "the default buckets" if size is None else f"buckets of {format_bytes(size)}"
        return (
            f"bucket_bytes='auto' takes {buckets}, order={order!r}: {1e3 * self.step_s:.3g} ms a step in the replay, "
            f"{1e3 * self.default_s:.3g} ms with the defaults"
        )

    def to_array(self) -> Array:
        """Return the choice as numbers in an array, for a broadcast."""
        return metadata([self.candidate, self.step_s, self.default_s])

    @classmethod
    def from_array(cls, array: Array) -> Choice:
        """Return the choice that `to_array` has put into an array."""
        candidate, step_s, default_s = map(float, array)
        return cls(candidate=int(candidate), step_s=step_s, default_s=default_s)


class Tuner:
    """Records the first steps of a model, and chooses its buckets.

    Args:
        rank: The rank that it runs on.
        make: Makes a model like it, given rank, parameters, `bucket_bytes`, `order` and `hook`.
        leaves: Its parameters.

    Raises:
        UsageError: If time is virtual.
    """

    def __init__(self, rank: Rank, make: MakeModel, leaves: Mapping[str, Array]) -> None:
        if rank.clock != "real":
            raise UsageError("bucket_bytes: 'auto' records real time; on the virtual clock, try sizes")
        self._rank, self._make = rank, make
        self._sizes = {name: (leaf.size, leaf.dtype.name) for name, leaf in leaves.items()}
        self._ready: list[list[tuple[str, int]]] = [[] for _ in range(RECORDED)]

    def note_gradient(self, step: int, name: str, gradient: object) -> None:
        """Note the moment at which a gradient is computed, in the first `RECORDED` steps."""
        if step >= RECORDED:
            return
        note, rank = self._ready[step].append, self._rank
        if isinstance(gradient, Future):
            gradient.add_done_callback(lambda _: note((name, rank.now_ns())))
        else:
            note((name, rank.now_ns()))

    async def choose(self) -> Array:
        """Replay the recording in a thread; return the choice as an array, for other ranks."""
        later_steps = self._ready[1:]  # the first step has other buckets
        recording = read_recording(self._rank.recorder.spans(), later_steps, self._sizes)
        choice = await trio.to_thread.run_sync(choose_candidate, recording, self._make)
        return choice.to_array()


def read_recording(
    spans: Sequence[Span], ready: Sequence[Sequence[tuple[str, int]]], sizes: Mapping[str, tuple[int, str]]
) -> StepRecording:
    """Return the times of a step from a rank's spans.

    Args:
        spans: Spans of the rank.
        ready: Of each recorded step, in order: the names of the parameters and when their gradients were there, in
            nanoseconds. The first step only says when the second one begins.
        sizes: As in a `StepRecording`.
    """
    computed = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "compute" and s.role == "program")
    waits: dict[str, list[int]] = {}
    heads: list[int] = []
    for before, step in pairwise(ready):
        at_ns = before[-1][1]
        for position, (name, ready_ns) in enumerate(step):
            busy_ns = _busy_ns(computed, at_ns, ready_ns)
            (waits.setdefault(name, []) if position else heads).append(busy_ns)
            at_ns = max(at_ns, ready_ns)
    backward = [(name, median(waits[name]) / 1e9) for name, _ in ready[-1][1:]]
    deepest_s = median([seconds for _, seconds in backward] or [0.0])  # taken to be like the others
    latency_s, per_byte_s = _measure_wire(spans, ready[0][-1][1])
    return StepRecording(
        sizes=sizes,
        forward_s=max(0.0, median(heads) / 1e9 - deepest_s),
        backward_s=((ready[-1][0][0], deepest_s), *backward),
        latency_s=latency_s,
        seconds_per_byte=per_byte_s,
    )


def _busy_ns(computed: Merged, start_ns: int, end_ns: int) -> int:
    """Return how long computes ran between two moments."""
    return length(intersect(computed, merge([(start_ns, max(start_ns, end_ns))])))


def _measure_wire(spans: Sequence[Span], from_ns: int) -> tuple[float, float]:
    """Return the latency of the wire, and its seconds for each byte, as `_Wire` takes them.

    The wire is busy from the end of the latency of a bucket to the end of the bucket; other buckets may wait meanwhile.
    """
    transfers = [(s.info, s.end_ns) for s in spans if s.kind == "comm" and s.info is not None and s.end_ns > from_ns]
    if not transfers:
        return 0.0, 0.0
    small_ns = [
        s.info.transfer_ns for s in spans if s.kind == "comm" and s.info is not None and s.info.nbytes <= _SMALL_BYTES
    ]
    latency_ns = min(small_ns, default=0)
    busy_ns = length(merge((min(info.met_ns + latency_ns, end_ns), end_ns) for info, end_ns in transfers))
    nbytes = sum(info.nbytes for info, _ in transfers)
    return latency_ns / 1e9, busy_ns / 1e9 / max(1, nbytes)


def choose_candidate(recording: StepRecording, make: MakeModel) -> Choice:
    """Replay all candidates, and return the first one that is at most 1 % slower than the best."""
    times = [replay(recording, make, size, order) for size, order in CANDIDATES]
    best = min(range(len(times)), key=lambda index: (times[index] > _NEAR_BEST * min(times), index))
    return Choice(candidate=best, step_s=times[best], default_s=times[0])


def replay(recording: StepRecording, make: MakeModel, size: Size, order: str) -> float:
    """Return the time of a step on the virtual clock, in seconds, with other buckets.

    Args:
        recording: Recording of real steps.
        make: Makes a model, given rank, parameters, `bucket_bytes`, `order` and `hook`.
        size: When a bucket is full.
        order: "forward" or "fifo".
    """
    with ignoring_environment():
        [times] = run(_run_steps, recording, make, size, order, ranks=1, clock=Virtual(shapes_only=True))
    return float(times[-1] - times[-3]) / 2e9


async def _run_steps(rank: Rank, recording: StepRecording, make: MakeModel, size: Size, order: str) -> list[int]:
    """Take the steps of a recording on the virtual clock; return the ends of their forward passes, in ns."""
    wire = _Wire(recording)
    params = {name: rank.empty(count, dtype) for name, (count, dtype) in recording.sizes.items()}
    model = make(rank, params, bucket_bytes=size, order=order, hook=wire.carry)
    layer_s = recording.forward_s / len(params)
    forward_ends_ns: list[int] = []
    for _ in range(_STEPS):
        for name in params:
            rank.compute(nothing, model[name], seconds=layer_s)
        rank.compute(lambda: forward_ends_ns.append(rank.now_ns()), seconds=0.0)
        for name, seconds in recording.backward_s:
            model.reduce(name, rank.compute(_identity, params[name], seconds=seconds))
        model.step()
    await model.finish()
    return forward_ends_ns


def _identity(gradient: Array) -> Array:
    """Return the gradient; its compute takes the recorded time."""
    return gradient


class _Wire:
    """One wire that carries buckets in chunks, the most urgent first."""

    def __init__(self, recording: StepRecording) -> None:
        self._latency_s, self._seconds_per_byte = recording.latency_s, recording.seconds_per_byte
        self._waiting: list[tuple[int, int, trio.Event]] = []
        self._busy_ns, self._asked = False, 0

    async def carry(self, bucket: GradientBucket) -> Array:
        """Sleep for the time that the reduction of a bucket takes on this wire; return its buffer."""
        await trio.sleep(self._latency_s)
        remaining = bucket.buffer.nbytes
        self._asked += 1
        turn = bucket.priority, self._asked
        while remaining > 0:
            await self._acquire(turn)
            await trio.sleep(min(remaining, _CHUNK_BYTES) * self._seconds_per_byte)
            remaining -= _CHUNK_BYTES
            self._release()
        return bucket.buffer

    async def _acquire(self, turn: tuple[int, int]) -> None:
        """Wait until the wire is free and no more urgent bucket waits for it."""
        if self._busy_ns or self._waiting:
            event = trio.Event()
            heappush(self._waiting, (*turn, event))
            await event.wait()
        self._busy_ns = True

    def _release(self) -> None:
        """Free the wire, and wake the most urgent bucket that waits."""
        self._busy_ns = False
        if self._waiting:
            heappop(self._waiting)[2].set()
