"""A predicted training step for `--json`: integers of nanoseconds, bytes, shares from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...planning.estimates import Estimate
from ...planning.search import Found
from ...planning.sensitivity import Sensitivity
from ...planning.trust import band_of, band_of_step
from ...planning.wires import busy

SCHEMA_VERSION = 1
"""It rises when a field changes its meaning or goes."""


def described(
    one: Estimate, moved: Sequence[Sensitivity], price: float | None, searched: tuple[list[str], Found] | None
) -> dict[str, object]:
    """Return all that the page says, and more digits of it."""
    parts = one.parts
    typical, worst = band_of_step(one.cluster, parts)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": asdict(one.model) | {"parameters": one.model.parameters},
        "layout": asdict(one.layout) | {"microbatches": one.layout.microbatches},
        "cluster": one.cluster.name,
        "ranks": one.layout.world_size,
        "assumed": one.virtual.meta() | {"alike": "stages"},
        "step_ns": round(parts.step_ns),
        "error": {"typical": typical, "worst": worst},
        "compute_ns": round(parts.compute_ns),
        "overlapped_ns": round(parts.overlapped_ns),
        "idle_ns": round(parts.idle_ns),
        "dimensions": {
            name: {"wire_ns": round(a.wire_ns), "waiting_ns": round(a.waiting_ns), "moving_ns": round(a.busy_ns)}
            for name, a in parts.by_dimension().items()
        },
        "operations": [
            {
                "dimension": each.dimension,
                "op": each.op,
                "bytes": each.nbytes,
                "dtype": each.dtype,
                "ranks": list(each.ranks),
                "count": amount.count,
                "wire_ns": round(amount.wire_ns),
                "waiting_ns": round(amount.waiting_ns),
                "moving_ns": round(amount.busy_ns),
                "error": asdict(band_of(one.cluster, each)),
            }
            for each, amount in parts.operations.items()
        ],
        "critical_path": [
            {"doing": doing, "name": name, "ns": round(ns)}
            for (doing, name), ns in sorted(parts.path.items(), key=lambda each: -each[1])
        ],
        "busy": {
            kind: asdict(each)
            for kind, each in busy(one.cluster, one.layout, parts, peer_direct=one.virtual.peer_direct).items()
        },
        "memory": asdict(one.memory) | {"total": one.memory.total, "there": one.cluster.memory_bytes()},
        "fits": one.fits,
        "samples_per_s": one.samples_per_s,
        "tokens_per_s": one.tokens_per_s,
        "model_flops_utilisation": one.utilisation,
        "cost_of_sample": None if price is None else one.cost_of_sample(price),
        "sensitivities": [asdict(each) for each in moved],
        "simulated_microbatches": one.simulated,
        "search": None if searched is None else _searched(*searched),
    }


def _searched(names: list[str], found: Found) -> dict[str, object]:
    return {
        "names": names,
        "tried": found.tried,
        "complete": found.complete,
        "simulated": [asdict(layout) | {"step_ns": round(step_s * 1e9)} for layout, step_s in found.simulated],
        "left_out": {why: len(layouts) for why, layouts in found.left_out.items()},
    }
