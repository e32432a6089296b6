"""Tables that the command prints of a timeline: operations, stragglers, the critical path, two runs, predictions."""

from __future__ import annotations

from collections.abc import Sequence

from ...timeline.measure.critical_path import PathLink
from ...timeline.measure.operations import Operations
from ...timeline.replay.prediction import AWAITS_LATER, Prediction
from ...timeline.spans import ENDED
from ...timeline.why.stragglers import Straggler
from ...timeline.why.verdict import Verdict
from ...units import columns, figure, figure_unit, format_bytes, parse_bytes, wrapped


def operations_table(rows: Sequence[Operations], *, ranks: int, width: int) -> list[str]:
    """Return the table of operations: for each of `ranks` ranks up to their number of calls, the rest for each call."""
    if not rows:
        return ["communication: none recorded"]
    unit, unit_ns = figure_unit(max(max(row.exposed_ns // ranks, row.transfer_ns // row.count) for row in rows))
    times = (f"exposed/{unit}", "wait", "calls", "transfer")
    heads = ("operation", "called at", *times, "size", "busGB/s", "queued", "algorithm")
    figures = [
        (
            row.op,
            row.call_site,
            figure(row.exposed_ns / ranks, unit_ns),
            figure(row.exposed_waiting_ns / ranks, unit_ns),
            f"{row.count / ranks:.4g}",
            figure(row.transfer_ns / row.count, unit_ns),
            format_bytes(row.nbytes // row.count),
            f"{row.busbw_bytes_per_s / 1e9:.3g}",
            figure(row.queued_ns / row.count, unit_ns),
            row.algorithm,
        )
        for row in rows
    ]
    return columns(heads, figures, width=width, words=[0, 1])


def stragglers_table(
    rows: Sequence[Straggler], *, width: int, partial: bool = False, rows_at_most: int = 10
) -> list[str]:
    """Return the table of the worst ranks; the others are counted.

    Args:
        rows: The ranks, worst first.
        width: Columns of the terminal.
        partial: Whether the trace has not all ranks, and does not tell when the others came.
        rows_at_most: How many ranks to show.
    """
    unit, unit_ns = figure_unit(max((max(row.exposed_ns, row.slow_ns) for row in rows), default=0))
    figures = [
        (
            str(row.arrivals.rank),
            f"{row.arrivals.last} of {row.arrivals.collectives}",
            figure(row.exposed_ns, unit_ns),
            figure(row.slow_ns, unit_ns),
            row.doing,
        )
        for row in rows[:rows_at_most]
        if 20 * max(row.exposed_ns, row.slow_ns) >= unit_ns
    ]
    if not figures and partial:
        return ["other ranks are not in the trace: it cannot tell who was waited for, or who was slow"]
    if not figures:
        return ["nobody was waited for, and nobody was slow"]
    heads = ("rank", "came last", f"waited for/{unit}", f"slow/{unit}", "it was at")
    rest = len(rows) - len(figures)
    lines = columns(heads, figures, width=width, words=[4])
    return lines + ([f"and {rest} others, for whom ranks waited less, or not at all"] if rest > 0 else [])


def critical_path_table(path: Sequence[PathLink], *, width: int, rows_at_most: int = 12) -> list[str]:
    """Return the table of the parts of the critical path, the longest first."""
    parts: dict[tuple[int, str], tuple[int, int]] = {}
    for link in path:
        ns, times = parts.get((link.rank, str(link)), (0, 0))
        parts[link.rank, str(link)] = ns + link.duration_ns, times + 1
    total_ns = sum(link.duration_ns for link in path)
    unit, unit_ns = figure_unit(total_ns)
    ordered = sorted(parts.items(), key=lambda item: (-item[1][0], item[0]))
    figures = [
        (what, str(rank), figure(ns, unit_ns), f"{ns / max(total_ns, 1):.0%}", str(times))
        for (rank, what), (ns, times) in ordered[:rows_at_most]
    ]
    lines = columns(("on the critical path", "rank", unit, "share", "times"), figures, width=width, words=[0])
    rest_ns = sum(ns for _, (ns, _) in ordered[rows_at_most:])
    return lines + ([f"and {len(ordered) - rows_at_most} more, {figure(rest_ns, unit_ns)} {unit}"] if rest_ns else [])


_SELDOM = ("event loop kept", "copies", "queued")
"""Rows that are left out where both runs have nothing of the kind."""
_ROWS = (
    ("compute", "compute_ns"),
    ("exposed", "exposed_ns"),
    ("  waiting for ranks", "waiting_ns"),
    ("  on the wire", "wire_ns"),
    ("event loop kept", "kept_ns"),
    ("copies", "copy_ns"),
    ("queued", "queued_ns"),
    ("idle", "idle_ns"),
    ("bytes moved for", "transfer_ns"),
)


def comparison_table(one: Verdict, other: Verdict, *, width: int) -> list[str]:
    """Return the table of two runs: the step and the means of the ranks of both, and the differences."""
    unit, unit_ns = figure_unit(max(one.wall_ns, other.wall_ns))
    pairs = [("step", float(one.wall_ns), float(other.wall_ns))]
    rows_of = [(text, _mean_ns(one, name), _mean_ns(other, name)) for text, name in _ROWS]
    pairs += [row for row in rows_of if row[0] not in _SELDOM or row[1] or row[2]]
    rows = [
        (
            text,
            figure(first, unit_ns),
            figure(second, unit_ns),
            _signed_figure(first - second, unit_ns),
            _percent_text(first, second),
        )
        for text, first, second in pairs
    ]
    return columns((f"mean of a rank/{unit}", "this", "against", "difference", ""), rows, width=width, words=[0])


def comparison_sentence(verdict: Verdict, base: Verdict) -> str:
    """Return one sentence on how much longer a run takes than another, and the part that differs most."""
    difference_ns = verdict.wall_ns - base.wall_ns
    unit, unit_ns = figure_unit(max(verdict.wall_ns, base.wall_ns))
    if not difference_ns:
        return f"both take {figure(verdict.wall_ns, unit_ns)} {unit}"
    parts = {
        text.strip(): _mean_ns(verdict, name) - _mean_ns(base, name)
        for text, name in _ROWS
        if text[0] == " " or text in _ALONE
    }
    most = max(parts, key=lambda text: parts[text] if difference_ns > 0 else -parts[text])
    return (
        f"{_signed_figure(difference_ns, unit_ns)} {unit} ({_percent_text(verdict.wall_ns, base.wall_ns)}) against "
        f"{figure(base.wall_ns, unit_ns)} {unit}, mostly {most}: {_signed_figure(parts[most], unit_ns)} {unit}"
    )


_ALONE = ("compute", "event loop kept", "copies", "queued", "idle")


def _mean_ns(verdict: Verdict, name: str) -> float:
    return float(getattr(verdict, name)) / max(verdict.ranks, 1)


def _signed_figure(ns: float, unit_ns: int) -> str:
    return f"{'-' if ns < 0 else '+'}{figure(abs(ns), unit_ns)}"


def _percent_text(first: float, second: float) -> str:
    return f"{100 * (first - second) / second:+.1f}%" if second else "n/a"


def prediction_table(one: Prediction, *, width: int) -> list[str]:
    """Return the table of a prediction: the step and the means of the ranks, as measured, replayed and predicted."""
    unit, unit_ns = figure_unit(one.measured.wall_ns)
    verdicts = (one.measured, one.replayed, one.predicted)
    rows = [("step", *(figure(verdict.wall_ns, unit_ns) for verdict in verdicts))]
    for text, name in (("compute", "compute_ns"), ("waiting for ranks", "waiting_ns"), ("on the wire", "wire_ns")):
        rows.append((text, *(figure(getattr(v, name) / max(v.ranks, 1), unit_ns) for v in verdicts)))
    heads = (f"mean of a rank/{unit}", "measured", "replayed", "predicted")
    return columns(heads, rows, width=width, words=[0])


_HOW = {
    "stragglers": "share its work out evenly; to move it off the step, or to mend a slow host, gains more",
    "loop": "trio.to_thread.run_sync in a nursery in place of the call, awaited late: awaited at once, it makes the "
    "others wait as well; rank.compute(function, ...) would queue it behind the computes of the rank",
    "barriers": "leave out await rank.barrier(): operations wait for their ranks themselves",
    "awaits": "issue first and await at the end of the step: keep the futures in a list",
    "updates": "rank.compute(..., stream='optimizer'); this holds if no compute of the loop needs its result",
    "bucket_bytes": "DataParallel(..., bucket_bytes=...), or join arrays before all_reduce",
    "order": "order='forward', or a priority= that is lower for what forward needs first",
    "algorithm": "overlap run --algorithm NAME, or run(..., algorithm='NAME')",
    "streams": "stream=rank.stream(...), another name for each line that issues operations",
    "window": "rank.stream(name, window=NAME), or DataParallel(..., in_flight=NAME)",
    "bytes": "hook=hooks.bfloat16(), or another hook that sends less",
    "compute": "what half the time would bring there; the rest is up to you",
}
_HOW_TORCH = {
    "awaits": "issue first and wait at the end of the step: async_op=True, and keep the works in a list",
    "bucket_bytes": "DistributedDataParallel(..., bucket_cap_mb=NAME), or flatten tensors before all_reduce",
    "algorithm": "OVERLAP_ALGORITHM=NAME",
    "bytes": "register_comm_hook of DistributedDataParallel, with bf16_compress_hook or another that sends less",
    "barriers": "leave out dist.barrier(): operations wait for their ranks themselves",
}
"""The same for programs of PyTorch, where there is another word for it."""


def advice_text(advice: list[Prediction], *, width: int) -> list[str]:
    """Return the advice: each change, the step that it would give, and how to make it."""
    if not advice:
        return ["nothing that was tried would make the step shorter by half a percent"]
    unit, unit_ns = figure_unit(advice[0].measured.wall_ns)
    ended = advice[0].timeline.meta.get(ENDED)
    badly = f" in a run that {ended}" if ended else ""
    lines = [f"the step takes {figure(advice[0].measured.wall_ns, unit_ns)} {unit}{badly}; it would take"]
    for number, prediction in enumerate(advice, 1):
        change = prediction.changes[0]
        kind, _, value = change.text.partition("=")
        how = _change_advice(kind.split(" ")[0], value, torch=prediction.measured.torch)
        gain = ", ".join(filter(None, (f"{-prediction.gain_share:+.1%}", prediction.range_text(unit_ns))))
        head = f"{number}. {figure(prediction.predicted.wall_ns, unit_ns)} {unit} ({gain})  {change.text}: "
        sentences = (change.what, AWAITS_LATER, how) if prediction.awaits_later else (change.what, how)
        lines += wrapped(head + "; ".join(sentences), width, rest="   ")
    return lines


def _change_advice(kind: str, value: str, *, torch: bool) -> str:
    """Return how a program makes a change: "bucket_bytes" and "4MiB" are bucket_cap_mb=4 in PyTorch."""
    if torch and kind == "bucket_bytes":
        value = f"{parse_bytes(value, argument=kind) / 2**20:g}"
    return {**_HOW, **(_HOW_TORCH if torch else {})}[kind].replace("NAME", value)
