"""Plans: the cheapest algorithm of a collective on its machine, with alternatives and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ..collectives.generators import GENERATORS, fits, misfit
from ..collectives.proof import verify
from ..collectives.schedule import EXACT, IN_RANK_ORDER, Schedule
from ..errors import ScheduleError, UsageError, argument_text
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
    """Return all names that the argument `algorithm` can have."""
    return [DIRECT, *sorted({name for by_name in GENERATORS.values() for name in by_name})]


def check_algorithm(name: str) -> None:
    """Check that some collective has an algorithm of this name.

    Raises:
        UsageError: None has; the error lists the known names.
    """
    if not isinstance(name, str) or name not in algorithms():
        raise UsageError(f"algorithm: {argument_text(name)} is unknown; known are {', '.join(algorithms())}")


def check_algorithm_for(collective: str, name: object, size: int, *, exact: bool = False) -> None:
    """Check that a collective has an algorithm, and that the algorithm takes a number of ranks.

    Args:
        collective: Name of the collective.
        name: Argument `algorithm` of the caller, which should be the name of an algorithm.
        size: Number of ranks.
        exact: Whether the algorithm must reduce in the order of ranks.

    Raises:
        UsageError: One of these does not hold; the error lists the algorithms that would do.
    """
    names = [DIRECT, *(algorithm for algorithm in GENERATORS[collective] if not exact or algorithm in IN_RANK_ORDER)]
    if isinstance(name, str) and name in names and fits(name, size):
        return
    if not isinstance(name, str) or name not in (DIRECT, *GENERATORS[collective]):
        wrong = f"{collective} has no {argument_text(name)}"
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
    detail: str = ""  # algorithms of its phases, or how it is fitted to the group; may be empty
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
    detail: str  # algorithms of its phases, or how it is fitted to the group; may be empty
    slices: int  # number of slices that the data is cut in
    predicted_s: float  # time from the last rank's call to the last rank's result
    extrapolated: bool  # whether no published measurement of this shape went into the model
    steps: int  # number of steps with messages, with the data in one piece
    bytes_per_rank: int  # bytes that the busiest rank sends
    hops: tuple[tuple[str, int], ...]  # (kind of wire, number of such wires on the longest ways of all steps)
    busiest: BusiestWire | None  # the wire that is busy longest; None without messages
    alternatives: tuple[Alternative, ...]  # all other algorithms: the fastest first, then those that do not apply
    library: str  # name of the machine's own library that has the algorithm; "" if the algorithm is one of overlap
    proposals: tuple[Alternative, ...]  # faster schedules that the library lacks, the fastest first
    levels: tuple[Crossing, ...]  # bytes across each level of the network's switches; () if the file has no levels
    option: AlgorithmOption = field(repr=False, compare=False)  # the chosen option, placed and priced
    # price and option of the next best algorithm; None if no other one applies.
    runner_up: tuple[Price, AlgorithmOption] | None = field(repr=False, compare=False)

    @property
    def cheapest(self) -> str:
        """Name of the cheapest algorithm for exactly `nbytes`.

        All sizes of a class share one plan (see `size_class`): `algorithm` is the cheapest for the largest of them.
        """
        # Alternatives are sorted, fastest first; those that do not apply, at the end, have no time.
        best = next((option for option in self.alternatives if option.predicted_s is not None), None)
        return best.algorithm if best and (best.predicted_s or 0.0) < self.predicted_s else self.algorithm

    @property
    def breakdown(self) -> CostBreakdown:
        """Terms of the predicted time. Each access computes them, which takes as long as some prices."""
        return self.option.breakdown(self.nbytes, self.slices)

    @property
    def reason(self) -> str:
        """Sentence that compares the algorithm with the next best one. Each access computes it."""
        if self.runner_up is None:
            return "nothing else applies"
        price, option = self.runner_up
        return compare_terms(self.breakdown, option.breakdown(self.nbytes, price.slices), option.label)

    def schedule(self) -> Schedule:
        """Return the proved table of transfers. It is made once for each option and number of slices.

        Raises:
            ScheduleError: The table does not compute the collective; or there is none, as for the short cut.
        """
        return _make_proved_schedule(self.option, self.slices)


@lru_cache(maxsize=64)
def _make_proved_schedule(option: AlgorithmOption, slices: int) -> Schedule:
    """Return the proved table of an option for a number of slices; cached, as proofs take long."""
    schedule = option.schedule(slices)
    verify(schedule)
    return schedule


def size_class(nbytes: int) -> int:
    """Return the largest size of the size class of `nbytes`. All sizes of a class share one plan.

    From one power of two to the next there are four classes. Those from 1024 to 2048 bytes end with 1280, 1536, 1792
    and 2048.
    """
    if nbytes <= _CLASSES_PER_OCTAVE:
        return nbytes
    unit = 1 << (nbytes.bit_length() - _CLASSES_PER_OCTAVE.bit_length())
    # Round up to a multiple of the unit.
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
    """Return the plan of a collective on a modelled machine: its cheapest algorithm. Plans are cached.

    All sizes of a class (see `size_class`) get the algorithm that is cheapest for the largest size, because programs
    are compiled once for each class. The prices in the plan are those of `nbytes`.

    Args:
        op: Name of the collective.
        nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
        cluster: The machine.
        ranks: World ranks of the group, in group order; None: all.
        dtype: Type of the elements.
        root: Group rank of the root, for rooted collectives.
        pairs: Pairs of a permute, in group ranks; None: every rank sends to the next one.
        peer_direct: Whether network adapters read device memory themselves. This matters if the machine's file has a
            cost of copies.
        programs_only: Whether to leave out the short cut through shared memory, which has no table.
        algorithm: The only algorithm to consider, with all its combinations of phases; None: all algorithms.
        exact: Whether to consider only algorithms that reduce every element in the order of ranks.
        plain: Whether to take `algorithm` with its default options, even if these do not fit the wires of the group.

    Raises:
        UsageError: The collective or the dtype is unknown, or the root or the number of bytes is out of range.
        ScheduleError: `algorithm` does not apply to the group.
        TopologyError: The group is illegal on the machine, or no wire joins its ranks.
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
    # Not at the top: programs without a plan do not need these modules.
    from .candidates import list_options
    from .levels import find_crossings
    from .parameters import is_measured, itemsize_bytes

    _check_request(op, nbytes, exact)
    itemsize_bytes(dtype)  # raises an error for an unknown dtype
    group = tuple(range(cluster.world_size)) if ranks is None else ranks
    options, rejected = list_options(op, cluster, group, root, pairs, peer_direct, algorithm, exact, plain)
    options = [option for option in options if option.tabled or not programs_only]
    library, lacking = "", list["AlgorithmOption"]()
    if not exact and not programs_only:
        library, options, lacking = _split_options_by_library(op, cluster, options)
    if not options:
        reasons = "; ".join(f"{r.algorithm} does not apply: {r.why}" for r in rejected)
        reasons = reasons or f"algorithm {algorithm!r} does not apply{' as a program' if programs_only else ''}"
        raise ScheduleError(f"{op}: {reasons}; choose another algorithm, of {', '.join(GENERATORS[op])}")
    (price, best), *slower = _price_and_sort_options(options, nbytes)
    proposed = _price_options(lacking, nbytes, below_s=price.total_s)
    faster = [entry for entry in proposed if entry.price.total_s < price.total_s]
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
        busiest=_find_busiest_wire(best, nbytes),
        alternatives=_list_alternatives(sorted([*slower, *proposed[len(faster) :]], key=_TOTAL_S), rejected),
        library=library,
        proposals=_list_alternatives(faster, ()),
        levels=find_crossings(cluster, group, best.parts),
        option=best,
        runner_up=slower[0] if slower else None,
    )


def _check_request(op: str, nbytes: int, exact: bool) -> None:
    """Raise `UsageError` for an unknown collective, a size out of range, or `exact` with a collective that lacks it."""
    if op not in GENERATORS:
        raise UsageError(f"op: {op!r} is no collective; known are {', '.join(GENERATORS)}")
    if exact and op not in EXACT:
        raise UsageError(
            f"exact: {' and '.join(EXACT)} reduce in the order of ranks if asked to, {op} does not; leave out exact"
        )
    if not 0 <= nbytes <= _MOST_BYTES:
        raise UsageError(f"nbytes: expected 0 to {_MOST_BYTES}, got {nbytes}")


class _Priced(NamedTuple):
    """An option with its price for some number of bytes."""

    price: Price
    option: AlgorithmOption


_TOTAL_S = attrgetter("price.total_s")


def _price_and_sort_options(options: list[AlgorithmOption], nbytes: int) -> list[_Priced]:
    """Return priced options: first the choice for the size class of `nbytes`, then the others, the fastest first."""
    priced = _price_options(options, size_class(nbytes))
    if nbytes == size_class(nbytes):
        return priced
    # The cheapest option for the largest size of the class comes first, whatever its price for `nbytes`.
    best = priced[0].option
    others = [option for option in options if option is not best]
    price = best.price(nbytes)
    return [_Priced(price, best), *_price_options(others, nbytes, below_s=price.total_s)]


def _split_options_by_library(
    op: str, cluster: Cluster, options: list[AlgorithmOption]
) -> tuple[str, list[AlgorithmOption], list[AlgorithmOption]]:
    """Return the name of the machine's own library, the options whose algorithms it has, and the other options.

    These are "", all options, and [] if it is not known which algorithms the library has for the collective, or if it
    has none of the options.
    """
    library = cluster.machine.collectives.library
    if library is None or not library.lists_schedules_of(op):
        return "", options, []
    has = [option for option in options if library.runs(op, option.made_of)]
    if not has:
        return "", options, []
    return library.name, has, [option for option in options if option not in has]


def _price_options(options: Sequence[AlgorithmOption], nbytes: int, *, below_s: float = inf) -> list[_Priced]:
    """Return options with their prices, the cheapest first.

    An option that cannot beat the cheapest one so far, or the price `below_s`, may be priced only roughly, in one
    piece.
    """
    priced: list[_Priced] = []
    for option in options:
        price = option.price(nbytes, below_s=below_s)
        priced.append(_Priced(price, option))
        below_s = min(below_s, price.total_s)
    return sorted(priced, key=_TOTAL_S)


def _find_busiest_wire(option: AlgorithmOption, nbytes: int) -> BusiestWire | None:
    """Return the wire of an option that is busy longest, for `nbytes`; None if the option sends no messages."""
    busiest = option.busiest_wire()
    if busiest is None:
        return None
    placed, wire, s_per_byte = busiest
    kind, name = str(placed.placement.wires().kind[wire]), placed.placement.describe(wire)
    return BusiestWire(kind=kind, name=name, busy_s=s_per_byte * nbytes)


def _list_alternatives(priced: Sequence[_Priced], rejected: Sequence[Rejected]) -> tuple[Alternative, ...]:
    """Return priced options with their times, then rejected algorithms with the reasons."""
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
    """Return a sentence that compares the cheapest option with the next best: the ratio, the largest gain and loss.

    Args:
        winner: Terms of the time of the cheapest option.
        second: Terms of the time of the next best option.
        name: Name of the next best option.
    """
    won, lost = asdict(winner), asdict(second)
    gains = {term: lost[term] - won[term] for term in won}
    parts = [f"{format_ns(gain * 1e9)} less for {NAMES[term]}" for term, gain in _largest_gain(gains, 1)]
    parts += [f"{format_ns(-loss * 1e9)} more for {NAMES[term]}" for term, loss in _largest_gain(gains, -1)]
    first_s, second_s = sum(won.values()), sum(lost.values())
    ratio = second_s / first_s - 1 if first_s else 0.0
    compared = f"{ratio:.0%} faster than {name}" if ratio >= _NOTEWORTHY else f"as fast as {name}"
    if ratio <= -_NOTEWORTHY:  # possible, as the largest size of a class decides for all sizes of the class
        compared = f"{-ratio:.0%} slower than {name}, but faster for the largest size of the same class"
    return f"{compared}: {', but '.join(parts)}" if parts else compared


_NOTEWORTHY = 0.005
"""Least difference of two times that counts, as a share of the smaller one."""


def _largest_gain(gains: dict[str, float], sign: int) -> list[tuple[str, float]]:
    """Return the term with the largest gain (`sign` 1) or loss (-1), as a list of one; [] if it is not noteworthy."""
    name = max(gains, key=lambda term: sign * gains[term])
    most = max(abs(gain) for gain in gains.values())
    return [(name, gains[name])] if sign * gains[name] > max(0.05 * most, _LEAST_S) else []


_LEAST_S = 5e-11
"""Smallest gain that is reported, in seconds: smaller ones may be sums of rounding to ticks of a picosecond."""
