"""Pages of a predicted training step (time, memory, error, verdict), and of a search among layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ...planning.estimates import SLOWER, Estimate
from ...planning.layout import Layout
from ...planning.parts import MESSAGE, Amount
from ...planning.search import SearchResult
from ...planning.trust import Band, operation_band, step_band
from ...planning.validation import COVERED
from ...units import columns, format_bytes, format_ns, wrapped

_LISTED = 8  # rows of each table


def page(step: Estimate, wall_s: float, width: int) -> Iterator[str]:
    """Yield the page of a predicted step, which took `wall_s` seconds to simulate."""
    yield from _head_lines(step, width)
    yield ""
    yield from _dimension_table(step, width)
    yield ""
    yield from _operation_table(step, width)
    yield ""
    yield from _critical_path_table(step, width)
    yield ""
    yield from _verdict_lines(step, wall_s, width)


def _head_lines(step: Estimate, width: int) -> Iterator[str]:
    """Yield the lines about the model, its layout, the assumptions, and the memory of the fullest rank."""
    model, layout, virtual = step.model, step.layout, step.virtual
    active = f", {_number(model.active_parameters)} active" if model.experts else ""
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}"
    title = (
        f"{model.name} ({_number(model.parameters)} parameters{active}) on {step.cluster.name}, {ranks}, virtual time"
    )
    yield from wrapped(title, width)
    yield from _field("layout", _layout_text(layout, model.sequence), width)
    sway = f"computes reach {virtual.efficiency:.4g} of the {layout.dtype} peak"
    if step.device is not None:
        sway = f"products, attention and memory as measured of {step.cluster.machine.chip.name}"
    yield from _field("assumed", f"{sway}; {virtual.conditions}; {virtual.interference}", width)
    memory, there = step.memory, step.cluster.memory_bytes()
    of_all = f" of {format_bytes(int(there))}" if there is not None else ""
    parts = ", ".join(
        f"{name} {format_bytes(round(getattr(memory, name)))}"
        for name in ("weights", "gradients", "optimizer", "activations")
    )
    yield from _field(
        "memory", f"{format_bytes(round(memory.total))}{of_all} on ranks of stage {memory.stage}: {parts}", width
    )


def _layout_text(layout: Layout, sequence: int) -> str:
    """Return a layout in words: its degrees, pipeline, batch, ZeRO, checkpointing and buckets."""
    zero = f"ZeRO-{layout.zero}" if layout.zero else "every rank updates all weights"
    zero += f" within each of {layout.replicate} groups" if layout.replicate > 1 else ""
    zero += ", gathering under the next step" if layout.overlap_gather else ""
    pipeline = f"{layout.schedule}, " if layout.pp > 1 else ""
    batch = f"{layout.microbatches} microbatches of {layout.micro_batch} x {sequence} tokens"
    checkpointing, buckets = f"checkpointing {layout.checkpointing}", f"buckets of {format_bytes(layout.bucket_bytes)}"
    return f"{layout}, axes {layout.order}; {pipeline}{batch}; {zero}; {checkpointing}; {buckets}"


def _dimension_table(one: Estimate, width: int) -> list[str]:
    """Return the table of a step: compute, exposed communication by parallel dimension, idle time, and their sum."""
    parts = one.parts

    def row(name: str, ns: float, wire: str = "", waiting: str = "", busy: str = "") -> tuple[str, ...]:
        return name, _ms(ns), f"{ns / parts.step_ns:.1%}", wire, waiting, busy

    rows = [row("compute", parts.compute_ns)]
    for dimension, amount in parts.by_dimension().items():
        times = _ms(amount.wire_ns), _ms(amount.waiting_ns), _ms(amount.busy_ns)
        rows.append(row(f"exposed {dimension}", amount.exposed_ns, *times))
    rows += [row("idle", parts.idle_ns), row("step", parts.step_ns)]
    heads = ("mean over ranks", "ms", "share", "on wires", "waiting", "moving")
    return columns(heads, rows, width=width, words=[0])


def _operation_table(one: Estimate, width: int) -> list[str]:
    """Return the table of operations of all stages, the most exposed first."""
    merged: dict[tuple[str, str, int, int, Band], Amount] = {}
    for operation, amount in one.parts.operations.items():
        size = 2 if operation.op == MESSAGE else len(operation.ranks)
        key = operation.dimension, operation.op, operation.nbytes, size, operation_band(one.cluster, operation)
        merged[key] = merged.get(key, Amount()).plus(amount)
    ordered = sorted(merged.items(), key=lambda each: (-each[1].exposed_ns, -each[1].busy_ns, str(each[0][:4])))
    rows = [
        (f"{dimension} {op}", format_bytes(nbytes), str(size), f"{amount.count:,.6g}",
         format_ns(amount.busy_ns / amount.count), f"{'' if band.measured else '~'}{band.typical:.0%}-{band.worst:.0%}",
         _ms(amount.exposed_ns))
        for (dimension, op, nbytes, size, band), amount in ordered[:_LISTED]
    ]  # fmt: skip
    heads = ("operation", "size", "ranks", "times", "in flight", "error", "exposed ms")
    lines = columns(heads, rows, width=width, words=[0])
    if len(ordered) > _LISTED:
        lines.append(f"and {len(ordered) - _LISTED} more, {_ms(sum(a.exposed_ns for _, a in ordered[_LISTED:]))} ms")
    bands = sorted({(key[4].rows, key[4].source) for key in merged})
    counts = "; ".join(f"{rows} rows of {of}" for rows, of in bands)
    note = (
        f"error: median and worst on published rows that nothing was fitted to ({counts}); ~ of other shapes than this"
    )
    return [*lines, *wrapped(note, width)]


def _critical_path_table(one: Estimate, width: int) -> list[str]:
    """Return the table of the parts of the critical path, the longest first, with their shares of its time."""
    path = sorted(one.parts.path.items(), key=lambda each: (-each[1], each[0]))
    total_ns = sum(ns for _, ns in path) or 1.0
    rows = [
        (_activity_text(doing, name), _ms(ns), f"{ns / total_ns:.1%}") for (doing, name), ns in path[:_LISTED] if ns
    ]
    return columns(("on the critical path", "ms", "share"), rows, width=width, words=[0])


def _activity_text(doing: str, name: str) -> str:
    return {"compute": f"compute {name}", "wire": name, "waiting": f"waiting in {name}"}.get(doing, "program")


def _verdict_lines(step: Estimate, wall_s: float, width: int) -> Iterator[str]:
    """Yield the simulated part, the throughput, and the last sentence: the step, its likely error, and its shares."""
    layout, parts = step.layout, step.parts
    few = (
        f"{step.simulated} of {layout.microbatches} microbatches"
        if step.simulated < layout.microbatches
        else "all of it"
    )
    few += ", the insides of layers once" if step.folded else ""
    if step.virtual.interference.off and parts.overlapped_ns:
        longer = SLOWER * parts.overlapped_ns / parts.step_ns
        slowdown = f"0 to {longer:.1%} longer if computes and communication slow each other down by up to {SLOWER:.0%}"
        yield from _field("interference", f"{slowdown}, while they overlap: {_ms(parts.overlapped_ns)} ms", width)
    yield from _field("simulated", f"{few}, in {wall_s:.1f} s", width)
    rate = f"{step.samples_per_s:.4g} samples/s, {step.tokens_per_s:,.0f} tokens/s"
    used = f", model flops utilisation {step.utilisation:.1%}" if step.utilisation is not None else ""
    yield from _field("throughput", rate + used, width)
    band = step_band(step.cluster, layout, parts)
    exposed = sum(amount.exposed_ns for amount in parts.operations.values())
    most = max(parts.by_dimension().items(), key=lambda each: each[1].exposed_ns, default=None)
    mostly = f", mostly {_exposure_text(most)}" if most is not None and exposed else ""
    fits = " DOES NOT FIT: the fullest rank needs more memory than there is." if step.fits is False else ""
    yield from wrapped(
        f"step {format_ns(parts.step_ns)} (+-{band.typical:.0%} typical, +-{band.covering:.0%} in {COVERED:.0%} of "
        f"{band.rows} published steps of {band.name} that were left out): "
        f"compute {parts.compute_ns / parts.step_ns:.0%}, exposed {exposed / parts.step_ns:.0%}{mostly}, "
        f"idle {parts.idle_ns / parts.step_ns:.0%}.{fits}",
        width,
    )


def _exposure_text(most: tuple[str, Amount]) -> str:
    """Return where exposed communication mostly comes from: wires, waiting for ranks, or the pipeline's bubble."""
    dimension, amount = most
    if amount.waiting_ns < amount.wire_ns:
        return f"{dimension} on wires"
    return "bubble of the pipeline" if dimension == "pp" else f"{dimension} waiting"


def search_page(names: Sequence[str], result: SearchResult, *, width: int) -> Iterator[str]:
    """Yield the result of a search: the layouts that were left out, the reasons, and the best ones."""
    done = "" if result.complete else ", and was interrupted" if not result.bound_s else ", and had no more time"
    title = f"searched for {', '.join(names)}: {result.tried} layouts, {len(result.simulated)} simulated{done}"
    yield from wrapped(title, width)
    for why, layouts in sorted(result.left_out.items(), key=lambda each: -len(each[1])):
        yield from wrapped(f"  {len(layouts)} left out: {why}", width, rest="    ")
    if result.bound_s:
        yield from wrapped(f"  no layout is faster than {format_ns(result.bound_s * 1e9)}, by a lower bound", width)
    yield ""
    ordered = sorted(result.simulated, key=lambda each: each[1])
    best_s = ordered[0][1]
    shown = list(dict.fromkeys((*_DEGREES, *names)))
    rows = [
        (_ms(s * 1e9), f"{s / best_s - 1:+.1%}", *(_value_text(layout, name) for name in shown))
        for layout, s in ordered[:_LISTED]
    ]
    heads = [{"bucket_bytes": "bucket"}.get(name, name) for name in shown]
    yield from columns(("step ms", "to best", *heads), rows, width=width)
    yield ""


_DEGREES = ("tp", "pp", "dp")


def _value_text(layout: Layout, name: str) -> str:
    value = getattr(layout, name)
    return format_bytes(value) if name == "bucket_bytes" else str(value)


def _number(count: int) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f}"


def _field(name: str, text: str, width: int) -> list[str]:
    return wrapped(f"{name:<13} {text}", width, rest=" " * 14)


# -- JSON ------------------------------------------------------------------------------------------------------------


def describe(step: Estimate, searched: tuple[list[str], SearchResult] | None) -> dict[str, object]:
    """Return the step for JSON: integers of nanoseconds, bytes, shares from 0 to 1."""
    parts = step.parts
    band = step_band(step.cluster, step.layout, parts)
    return {
        "model": asdict(step.model) | {"parameters": step.model.parameters},
        "layout": asdict(step.layout) | {"microbatches": step.layout.microbatches},
        "cluster": step.cluster.name,
        "ranks": step.layout.world_size,
        "assumed": step.virtual.meta() | {"alike": "stages"},
        "step_ns": round(parts.step_ns),
        "error": asdict(band),
        "compute_ns": round(parts.compute_ns),
        "overlapped_ns": round(parts.overlapped_ns),
        "idle_ns": round(parts.idle_ns),
        "dimensions": {
            name: {"wire_ns": round(a.wire_ns), "waiting_ns": round(a.waiting_ns), "moving_ns": round(a.busy_ns)}
            for name, a in parts.by_dimension().items()
        },
        "operations": _describe_operations(step),
        "critical_path": [
            {"doing": doing, "name": name, "ns": round(ns)}
            for (doing, name), ns in sorted(parts.path.items(), key=lambda each: -each[1])
        ],
        "memory": asdict(step.memory) | {"total": step.memory.total, "there": step.cluster.memory_bytes()},
        "fits": step.fits,
        "samples_per_s": step.samples_per_s,
        "tokens_per_s": step.tokens_per_s,
        "model_flops_utilisation": step.utilisation,
        "simulated_microbatches": step.simulated,
        "folded": step.folded,
        "device": None if step.device is None else asdict(step.device),
        "search": None if searched is None else _describe_search(*searched),
    }


def _describe_operations(step: Estimate) -> list[dict[str, object]]:
    """Return the operations of all stages for JSON, with the sums of their times and their likely errors."""
    return [
        {
            "dimension": operation.dimension,
            "op": operation.op,
            "bytes": operation.nbytes,
            "dtype": operation.dtype,
            "ranks": list(operation.ranks),
            "count": amount.count,
            "wire_ns": round(amount.wire_ns),
            "waiting_ns": round(amount.waiting_ns),
            "moving_ns": round(amount.busy_ns),
            "error": asdict(operation_band(step.cluster, operation)),
        }
        for operation, amount in step.parts.operations.items()
    ]


def _describe_search(names: list[str], result: SearchResult) -> dict[str, object]:
    """Return a search for JSON: simulated layouts with their steps in nanoseconds, and counts of others by reason."""
    return {
        "names": names,
        "tried": result.tried,
        "complete": result.complete,
        "bound_ns": round(result.bound_s * 1e9),
        "simulated": [asdict(layout) | {"step_ns": round(step_s * 1e9)} for layout, step_s in result.simulated],
        "left_out": {why: len(layouts) for why, layouts in result.left_out.items()},
    }
