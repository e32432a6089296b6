"""Plan of a collective: its algorithm on a machine, the alternatives, and the reason for the choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from topology import Cluster, cluster, format_ranks

from ...cost.levels import Crossing
from ...cost.parameters import itemsize_bytes, measured_sizes
from ...cost.select import NAMES, Alternative, Plan, plan
from ...errors import UsageError
from ...settings import Option
from ...units import format_bytes, format_s, parse_bytes, parse_index, parse_yes_no, wrap_text
from ..options import parse_group, shared_option
from ..output import Result, field_lines, page_width

OPTIONS = {
    "bytes": Option(
        read=str, metavar="SIZE", help="the larger one of input and output, such as 32MiB; always needed"
    ),
    "cluster": shared_option("cluster", "or a .toml file; always needed"),
    "dtype": shared_option("dtype", "default: float32"),
    "root": shared_option("root", rare=True),
    "exact": Option(read=parse_yes_no, rare=True, help="reduce every element in the order of ranks; as exact=True"),
    "top": Option(read=parse_index, rare=True, metavar="N", help="alternatives to print; default: 8"),
}  # fmt: skip


def document_and_page(op: str, options: Mapping[str, Any]) -> Result:
    """Return two functions for the plan of a collective: one makes its JSON document, the other its page.

    Raises:
        UsageError: If the size, the dtype or the root is impossible.
        TopologyError: If the machine is unknown, or the group is not legal on it.
    """
    if "bytes" not in options:
        raise UsageError("--bytes: is missing; pass the size of the data, such as --bytes 64MB")
    if "cluster" not in options:
        raise UsageError('--cluster: is missing; pass the machine, such as --cluster "trn2.48xlarge x4"')
    if "ranks" in options:
        ranks = options["ranks"]
        group = f"0-{max(int(ranks), 2) - 1}" if ranks.isdecimal() else ranks
        raise UsageError(f"--ranks: is for schedules only; for a collective pass --group {group}")
    ranks = parse_group(options["group"]) if "group" in options else None
    if ranks is not None and len(ranks) < 2:
        raise UsageError(f"--group: {options['group']!r} is one rank, which sends nothing; name a group, such as 0-7")
    dtype, machine = options.get("dtype", "float32"), _find_machine(options["cluster"], ranks)
    nbytes, element_bytes = parse_bytes(options["bytes"], argument="--bytes"), itemsize_bytes(dtype)
    if nbytes % element_bytes:
        raise UsageError(
            f"--bytes: {nbytes} bytes are not whole elements of {dtype}, of {element_bytes} bytes; "
            "choose a multiple of that"
        )
    asked = {name: options[name] for name in ("root", "exact") if name in options}
    chosen = plan(op, nbytes, machine, ranks, dtype=dtype, **asked)
    lines = [*_summary_lines(machine, chosen), *_advice_lines(machine, chosen), ""]
    return partial(json_document, chosen), lambda: [*lines, *_alternative_lines(chosen, options.get("top", 8))]


def _find_machine(name: str, ranks: tuple[int, ...] | None) -> Cluster:
    """Return the cluster of a name; a machine with any number of ranks gets the ranks that the group needs."""
    machine = cluster(name)
    if machine.machine.devices is None and ranks and max(ranks) >= machine.world_size:
        # the ranks that are needed, rounded up to as many on each node
        spread = -(-(max(ranks) + 1) // machine.nodes) * machine.nodes
        return cluster(name, ranks=spread)
    return machine


def json_document(chosen: Plan) -> dict[str, object]:
    """Return a plan for JSON: seconds, bytes, ranks of the world."""
    return {
        "op": chosen.op,
        "bytes": chosen.nbytes,
        "ranks": list(chosen.ranks),
        "cluster": chosen.cluster,
        "dtype": chosen.dtype,
        "algorithm": chosen.algorithm,
        "detail": chosen.detail,
        "slices": chosen.slices,
        "predicted_s": chosen.predicted_s,
        "extrapolated": chosen.extrapolated,
        "breakdown": asdict(chosen.breakdown),
        "steps": chosen.steps,
        "bytes_per_rank": chosen.bytes_per_rank,
        "hops": dict(chosen.hops),
        "busiest_link": asdict(chosen.busiest) if chosen.busiest else None,
        "reason": chosen.reason,
        "library": chosen.library,
        "proposals": list(map(_json_option, chosen.proposals)),
        "levels": [asdict(option) | {"bytes": option.share * chosen.nbytes} for option in chosen.levels],
        "alternatives": [_json_option(option) for option in chosen.alternatives if option.predicted_s is not None],
        "not_applicable": [
            {"algorithm": option.algorithm, "why": option.why_not} for option in chosen.alternatives if option.why_not
        ],
    }


def _json_option(option: Alternative) -> dict[str, object]:
    return {"algorithm": option.algorithm, "detail": option.detail, "predicted_s": option.predicted_s}


def _advice_lines(machine: Cluster, chosen: Plan) -> list[str]:
    """Return the rules of the machine that advise against the group of ranks, each with its severity."""
    return [
        line
        for each in machine.judge(chosen.ranks)
        for line in _figure_lines(each.severity, f"rule {each.rule.id}: {each.rule.text}")
    ]


def _summary_lines(machine: Cluster, chosen: Plan) -> list[str]:
    """Return the chosen algorithm as lines: its predicted time, the reason, and where time and bytes go."""
    sliced = f", in {chosen.slices} slices" if chosen.slices > 1 else ""
    spent = [f"{format_s(value)} {NAMES[term]}" for term, value in asdict(chosen.breakdown).items() if value > 0]
    hops = ", ".join(f"{count} {kind}" for kind, count in chosen.hops) or "none"
    busiest = chosen.busiest
    return [
        *wrap_text(
            f"{chosen.op} of {format_bytes(chosen.nbytes)} {chosen.dtype} on {len(chosen.ranks)} "
            f"rank{'s' * (len(chosen.ranks) != 1)} ({format_ranks(chosen.ranks)}) of {chosen.cluster}",
            page_width(),
            rest="  ",
        ),
        "",
        f"  {_algorithm_text(chosen.algorithm, chosen.detail)}{sliced}",
        *_figure_lines("predicted", format_s(chosen.predicted_s) + _extrapolation_text(machine, chosen)),
        *(_figure_lines("library", f"{chosen.library} carries it out") if chosen.library else []),
        *_figure_lines("why", chosen.reason),
        *_figure_lines("time goes to", ", ".join(spent) or "nothing"),
        *_figure_lines("steps", str(chosen.steps)),
        *_figure_lines("bytes", f"{format_bytes(chosen.bytes_per_rank)} sent by the busiest rank"),
        *_figure_lines("hops", f"{hops}, on the longest way of every step"),
        *(
            line
            for each in chosen.levels
            for line in _figure_lines(f"out of a {each.level}", _crossing_text(each, chosen.nbytes))
        ),
        *_figure_lines(
            "busiest link", f"{busiest.kind} {busiest.name}, {format_s(busiest.busy_s)} of bytes" if busiest else "none"
        ),
    ]


def _extrapolation_text(machine: Cluster, chosen: Plan) -> str:
    """Return " (extrapolated)", with the measured sizes of the shape if there are any, or "" inside their range."""
    if not chosen.extrapolated:
        return ""
    known = measured_sizes(machine, len(chosen.ranks), chosen.op, chosen.dtype)
    if not known:
        return " (extrapolated)"
    least, most = format_bytes(min(known)), format_bytes(max(known))
    return f" (extrapolated: measured {f'from {least} to {most}' if least != most else f'at {least} only'})"


def _figure_lines(name: str, text: str) -> list[str]:
    return field_lines(name, text, label_width=14)


def _crossing_text(crossing: Crossing, nbytes: int) -> str:
    """Return the bytes that leave the blocks of a level in words: of the busiest block, of all, and their time."""
    amount, all_of = format_bytes(round(crossing.busiest * nbytes)), format_bytes(round(crossing.share * nbytes))
    return f"{amount} of the busiest, {all_of} of all, {format_s(crossing.s_per_byte * nbytes)} on the way out"


def _alternative_lines(chosen: Plan, limit: int) -> Iterator[str]:
    """Yield slower algorithms, algorithms that do not apply, and faster ones of this package alone."""
    priced = [option for option in chosen.alternatives if option.predicted_s is not None]
    yield "alternatives:" if chosen.alternatives else "no alternatives"
    yield from _option_lines(chosen, priced, limit, "slower ones")
    for option in chosen.alternatives:
        if option.why_not:
            yield from wrap_text(
                f"{option.algorithm} does not apply: {option.why_not}", page_width(), first="  ", rest="    "
            )
    if chosen.proposals:  # this package could run them; they are no promise to users of the library
        yield ""
        yield f"proposals, which {chosen.library} lacks:"
        yield from _option_lines(chosen, chosen.proposals, limit, "more")


def _option_lines(chosen: Plan, options: Sequence[Alternative], limit: int, rest: str) -> Iterator[str]:
    """Yield a line for each of `limit` priced algorithms, with how much slower it is than the chosen one.

    `rest` is the name of the others.
    """
    for option in options[:limit]:
        assert option.predicted_s is not None
        more = f"{option.predicted_s / chosen.predicted_s - 1:+.0%}" if chosen.predicted_s else ""
        head = f"  {format_s(option.predicted_s):>8}  {more:>7}  "
        yield from wrap_text(_algorithm_text(option.algorithm, option.detail), page_width(), first=head, rest=" " * 21)
    if len(options) > limit:
        yield f"  and {len(options) - limit} {rest} (--top {len(options)})"


def _algorithm_text(algorithm: str, detail: str) -> str:
    return f"{algorithm} ({detail})" if detail else algorithm
