"""Plans: the cheapest algorithm of a collective on its machine, with alternatives and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

from ..collectives.generators import GENERATORS, fits, misfit
from ..collectives.proof import verify
from ..collectives.schedule import EXACT, IN_RANK_ORDER, Schedule
from ..errors import ScheduleError, UsageError, shown
from ..units import format_ns
from .clocks import CostBreakdown

if TYPE_CHECKING:
    from topology import Cluster

    from .levels import Crossing
    from .option import AlgorithmOption, Price, Rejected

DIRECT = "direct"

# 16 TiB, more than a rank's memory. Times of more bytes on slow wires would not fit in 64 bits of picoseconds.
_MOST_BYTES = 1 << 44

# Size classes in each power of two: a class is a quarter wide, less than the cost of a wrong choice in it.
_CLASSES_PER_OCTAVE = 4


def algorithms() -> list[str]:
    """Return the names that `algorithm=` takes."""
    return [DIRECT, *sorted({name for by_name in GENERATORS.values() for name in by_name})]


def check_algorithm(name: str) -> None:
    """Raise an error if no algorithm has that name.

    Raises:
        UsageError: With the known names.
    """
    if not isinstance(name, str) or name not in algorithms():
        raise UsageError(f"algorithm: {shown(name)} is unknown; known are {', '.join(algorithms())}")


def check_algorithm_for(collective: str, name: object, size: int, *, exact: bool = False) -> None:
    """Refuse an algorithm that a collective does not have, or that does not take a number of ranks.

    Raises:
        UsageError: With the names of the collective's algorithms.
    """
    names = [DIRECT, *(algorithm for algorithm in GENERATORS[collective] if not exact or algorithm in IN_RANK_ORDER)]
    if isinstance(name, str) and name in names and fits(name, size):
        return
    if not isinstance(name, str) or name not in (DIRECT, *GENERATORS[collective]):
        wrong = f"{collective} has no {shown(name)}"
    elif name not in names:
        wrong = f"{name!r} does not reduce in the order of ranks, as exact=True asks"
    else:
        wrong = f"{name!r} {misfit(name, size)}"
    able = [algorithm for algorithm in names if fits(algorithm, size)]
    raise UsageError(f"algorithm: {wrong}; expected one of {', '.join(able)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """An algorithm that was not chosen: its predicted time, or why it does not apply."""

    algorithm: str  # name of the algorithm
    detail: str = ""  # its parts; may be empty
    predicted_s: float | None = None  # predicted time; None if the algorithm does not apply
    why_not: str | None = None  # why the algorithm does not apply; None if it does


@dataclass(frozen=True, slots=True, kw_only=True)
class BusiestWire:
    """The wire that is busy longest."""

    kind: str  # kind of the wire
    name: str  # the two ends of the wire
    busy_s: float  # time that bytes are on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a collective on a machine: the algorithm that it becomes, its price, and the reason."""

    op: str  # the collective
    nbytes: int  # size of the whole vector: the larger one of a rank's input and output
    ranks: tuple[int, ...]  # world ranks of the group, in group order
    cluster: str  # name of the machine
    dtype: str  # type of the elements
    algorithm: str  # the cheapest algorithm for the largest size of the class of `nbytes`
    detail: str  # its parts; may be empty
    slices: int  # pieces that the data is cut in
    predicted_s: float  # time from the last rank's call to the last rank's result
    extrapolated: bool  # whether no published measurement of this shape went into the model
    steps: int  # number of steps with messages, with the data in one piece
    bytes_per_rank: int  # bytes that the busiest rank sends
    hops: tuple[tuple[str, int], ...]  # number of wires by kind on the longest ways of all steps
    busiest: BusiestWire | None  # the wire that is busy longest, None without messages
    alternatives: tuple[Alternative, ...]  # all other algorithms: the fastest first, then the ones that do not apply
    library: str  # the machine's own library, which has the algorithm; "" if it is ours
    proposals: tuple[Alternative, ...]  # faster schedules that the library lacks, the fastest first
    levels: tuple[Crossing, ...]  # crossings of each level of the network's switches; none if no file has levels
    option: AlgorithmOption = field(repr=False, compare=False)  # the cheapest option, placed and priced
    runner_up: tuple[Price, AlgorithmOption] | None = field(repr=False, compare=False)  # the next best, if any applies

    @property
    def cheapest(self) -> str:
        """Name of the cheapest algorithm for exactly `nbytes`; `algorithm` is for the largest size of the class."""
        best = next((option for option in self.alternatives if option.predicted_s is not None), None)
        return best.algorithm if best and (best.predicted_s or 0.0) < self.predicted_s else self.algorithm

    @property
    def breakdown(self) -> CostBreakdown:
        """Terms of the time. Pages alone need them, so each use computes them, which takes as long as some prices."""
        return self.option.breakdown(self.nbytes, self.slices)

    @property
    def reason(self) -> str:
        """Why the algorithm is the fastest, as a sentence that compares it with the next best; computed at each use."""
        if self.runner_up is None:
            return "nothing else applies"
        price, option = self.runner_up
        return compare_terms(self.breakdown, option.breakdown(self.nbytes, price.slices), option.label)

    def schedule(self) -> Schedule:
        """Generate and prove the table; once for each algorithm on a group, whatever the bytes.

        Raises:
            ScheduleError: If the table does not compute the collective, or there is none, as for the short cut.
        """
        return _prove(self.option, self.slices)


@lru_cache(maxsize=64)
def _prove(option: AlgorithmOption, slices: int) -> Schedule:
    schedule = option.schedule(slices)
    verify(schedule)
    return schedule


def size_class(nbytes: int) -> int:
    """Return the largest size of the class of `nbytes`. All sizes of a class share one plan."""
    if nbytes <= _CLASSES_PER_OCTAVE:
        return nbytes
    unit = 1 << (nbytes.bit_length() - _CLASSES_PER_OCTAVE.bit_length())
    return -(-nbytes // unit) * unit


def plan(
    op: str,
    nbytes: int,
    cluster: Cluster,
    ranks: Sequence[int] | None = None,
    *,
    dtype: str = "float32",
    root: int = 0,
    pairs: Sequence[tuple[int, int]] | None = None,
    peer_direct: bool = True,
    programs_only: bool = False,
    algorithm: str | None = None,
    exact: bool = False,
    plain: bool = False,
) -> Plan:
    """Choose the cheapest algorithm for a collective on a modelled machine. Plans are cached.

    All sizes of a class (see `size_class`) share the choice that is cheapest for the largest of them, because programs
    are compiled once for each class; the prices are those of `nbytes`.

    Args:
        op: Name of the collective.
        nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
        cluster: The machine.
        ranks: World ranks of the group, in group order; all by default.
        dtype: Type of the elements.
        root: Group rank of the root, for rooted collectives.
        pairs: Pairs of a permute, in group ranks; every rank to the next one by default.
        peer_direct: Whether network adapters read device memory themselves; matters if the machine's file has a cost of
            copies.
        programs_only: Leave out the short cut through shared memory, which has no table.
        algorithm: The only algorithm to consider, in all its forms; any by default.
        exact: Consider only algorithms that reduce every element in the order of ranks.
        plain: Take `algorithm` with its default options, even if it does not fit the wires of the group.

    Raises:
        UsageError: If the collective, the dtype, the root or the number of bytes is out of range.
        ScheduleError: If `algorithm` does not apply to the group.
        TopologyError: If the group is illegal on the machine, or no wire joins its ranks.
    """
    group = ranks if ranks is None or isinstance(ranks, tuple) else tuple(ranks)
    sent = None if pairs is None else tuple(pairs)
    return _cached_plan(
        op, nbytes, cluster, group, dtype, root, sent, peer_direct, programs_only, algorithm, exact, plain
    )


@lru_cache(maxsize=4096)
def _cached_plan(
    op: str,
    nbytes: int,
    cluster: Cluster,
    ranks: tuple[int, ...] | None,
    dtype: str,
    root: int,
    pairs: tuple[tuple[int, int], ...] | None,
    peer_direct: bool,
    programs_only: bool,
    algorithm: str | None,
    exact: bool,
    plain: bool,
) -> Plan:
    """Price all options of a collective, and return the plan of the cheapest; for the arguments see `plan`."""
    from .candidates import list_options
    from .levels import find_crossings
    from .parameters import is_measured, itemsize_bytes

    _check_request(op, nbytes, exact)
    itemsize_bytes(dtype)  # raises an error for an unknown dtype
    group = tuple(range(cluster.world_size)) if ranks is None else ranks
    options, rejected = list_options(op, cluster, group, root, pairs, peer_direct, algorithm, exact, plain)
    options = [option for option in options if option.tabled or not programs_only]
    library, lacking = "", options[:0]
    if not exact and not programs_only:
        library, options, lacking = _split_by_library(op, cluster, options)
    if not options:
        raise ScheduleError(f"{op}: {'; '.join(f'{r.algorithm} does not apply: {r.why}' for r in rejected)}")
    (price, best), *slower = _sort_options(options, nbytes)
    proposed = _price_options(lacking, nbytes, below_s=price.total_s)
    faster = [entry for entry in proposed if entry[0].total_s < price.total_s]
    return Plan(
        op=op,
        nbytes=nbytes,
        ranks=group,
        cluster=cluster.name,
        dtype=dtype,
        algorithm=best.algorithm,
        detail=best.detail,
        slices=price.slices,
        predicted_s=price.total_s,
        extrapolated=not is_measured(cluster, len(group), op, nbytes, dtype),
        steps=best.steps,
        bytes_per_rank=round(best.sent_share * nbytes),
        hops=tuple(sorted(best.hops().items())),
        busiest=_busiest_wire(best, nbytes),
        alternatives=_list_alternatives(sorted([*slower, *proposed[len(faster) :]], key=_total_s), rejected),
        library=library,
        proposals=_list_alternatives(faster, ()),
        levels=find_crossings(cluster, group, best.parts),
        option=best,
        runner_up=slower[0] if slower else None,
    )


def _check_request(op: str, nbytes: int, exact: bool) -> None:
    """Raise `UsageError` for an unknown collective, a size out of range, or an exact order that it does not have."""
    if op not in GENERATORS:
        raise UsageError(f"op: {op!r} is no collective; known are {', '.join(GENERATORS)}")
    if exact and op not in EXACT:
        raise UsageError(
            f"exact: {' and '.join(EXACT)} reduce in the order of ranks if asked to, {op} does not; leave out exact"
        )
    if not 0 <= nbytes <= _MOST_BYTES:
        raise UsageError(f"nbytes: expected 0 to {_MOST_BYTES}, got {nbytes}")


def _sort_options(options: list[AlgorithmOption], nbytes: int) -> list[tuple[Price, AlgorithmOption]]:
    """Return priced options: first the choice for the size class of `nbytes`, then the others, the fastest first."""
    priced = _price_options(options, size_class(nbytes))
    if nbytes == size_class(nbytes):
        return priced
    best = priced[0][1]
    others = [option for option in options if option is not best]
    price = best.price(nbytes)
    return [(price, best), *_price_options(others, nbytes, below_s=price.total_s)]


def _split_by_library(
    op: str, cluster: Cluster, options: list[AlgorithmOption]
) -> tuple[str, list[AlgorithmOption], list[AlgorithmOption]]:
    """Separate the algorithms of the machine's own library from the others.

    Returns:
        The library's name, its options, and the others; no name and all options, if its algorithms for the collective
        are not known, or if it has none for the group.
    """
    library = cluster.machine.collectives.library
    if library is None or not library.covers(op):
        return "", options, []
    has = [option for option in options if library.runs(op, option.made_of)]
    if not has:
        return "", options, []
    return library.name, has, [option for option in options if option not in has]


def _price_options(
    options: Sequence[AlgorithmOption], nbytes: int, *, below_s: float = inf
) -> list[tuple[Price, AlgorithmOption]]:
    """Return options with their prices, the cheapest first; each price is the bound for later options."""
    priced: list[tuple[Price, AlgorithmOption]] = []
    for option in options:
        price = option.price(nbytes, below_s=below_s)
        priced.append((price, option))
        below_s = min(below_s, price.total_s)
    return sorted(priced, key=_total_s)


def _total_s(priced: tuple[Price, AlgorithmOption]) -> float:
    return priced[0].total_s


def _busiest_wire(option: AlgorithmOption, nbytes: int) -> BusiestWire | None:
    """Return the wire that is busy longest, and its seconds for `nbytes`; None if no bytes are on wires."""
    busiest = option.busiest_wire()
    if busiest is None:
        return None
    placed, wire, s_per_byte = busiest
    kind, name = str(placed.placement.wires().kind[wire]), placed.placement.describe(wire)
    return BusiestWire(kind=kind, name=name, busy_s=s_per_byte * nbytes)


def _list_alternatives(
    priced: Sequence[tuple[Price, AlgorithmOption]], rejected: Sequence[Rejected]
) -> tuple[Alternative, ...]:
    slower = (
        Alternative(algorithm=option.algorithm, detail=option.detail, predicted_s=price.total_s)
        for price, option in priced
    )
    return (*slower, *(Alternative(algorithm=entry.algorithm, why_not=entry.why) for entry in rejected))


NAMES = {
    "waiting_s": "waiting for ranks",
    "launch_s": "launch",
    "start_s": "starting steps",
    "latency_s": "latency",
    "wire_s": "bytes on wires",
    "memory_s": "copies in memory",
    "reduction_s": "reductions",
}
"""Words for the terms of a `CostBreakdown`."""


def compare_terms(winner: CostBreakdown, second: CostBreakdown, name: str) -> str:
    """Return the gain of the winner over the next best as a sentence, with its losses.

    Args:
        winner: Terms of its time.
        second: Terms of the next best one's time.
        name: Name of the next best.
    """
    won, lost = asdict(winner), asdict(second)
    gains = {term: lost[term] - won[term] for term in won}
    parts = [f"{format_ns(gain * 1e9)} less for {NAMES[term]}" for term, gain in _largest_gain(gains, 1)]
    parts += [f"{format_ns(-loss * 1e9)} more for {NAMES[term]}" for term, loss in _largest_gain(gains, -1)]
    first_s, second_s = sum(won.values()), sum(lost.values())
    ratio = second_s / first_s - 1 if first_s else 0.0
    compared = f"{ratio:.0%} faster than {name}" if ratio >= _NOTEWORTHY else f"as fast as {name}"
    if ratio <= -_NOTEWORTHY:  # the largest size of a class decides for all of its sizes
        compared = f"{-ratio:.0%} slower than {name}, but faster for the largest size of the same class"
    return f"{compared}: {', but '.join(parts)}" if parts else compared


_NOTEWORTHY = 0.005


def _largest_gain(gains: dict[str, float], sign: int) -> list[tuple[str, float]]:
    """Return the term with the largest gain, or loss, if it is noteworthy."""
    name = max(gains, key=lambda term: sign * gains[term])
    most = max(abs(gain) for gain in gains.values())
    return [(name, gains[name])] if sign * gains[name] > max(0.05 * most, _LEAST_S) else []


_LEAST_S = 5e-11
"""Rounding of clocks with ticks of a picosecond, added up over some steps; smaller gains are not reported."""
