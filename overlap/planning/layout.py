"""Layout of a model and its batch on ranks: degrees of parallelism, and their checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import UsageError
from ..parallel.schedules import FAMILIES, PipelineSchedule, make
from .model import Model

CHECKPOINTING = ("none", "selective", "full")
"""Activations that the backward pass computes again: none, most of each layer, all of each layer."""

OPERATIONS = ("attention", "norm", "activation", "products")
"""Operations of a layer that can be computed again alone: fused attention, norms, the activation, every second product.

"selective" is the last three, torchtitan's default (torchtitan/models/llama3/infra/parallelize.py: all but every second
product, attention, and reductions). Megatron's of arXiv 2205.05198 is "attention"; fused attention keeps no scores.
"""

_SELECTIVE_OPERATIONS = frozenset(("norm", "activation", "products"))

ORDERS = ("pp.dp.tp", "dp.pp.tp", "pp.tp.dp", "dp.tp.pp", "tp.pp.dp", "tp.dp.pp")
"""Orders of the axes, outermost first: neighbours differ in the last axis. "dp" also has the axes of `ep` and `cp`."""

# Megatron's and torch's default for a gradient bucket is 40e6 parameters, or 25 MiB; ours lies between.
BUCKET_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism, and the batch.

    Raises:
        UsageError: If a figure cannot be meant, naming it.
    """

    tp: int = 1  # Ranks that share each matrix
    pp: int = 1  # Ranks that share the layers
    dp: int = 1  # Ranks that share the samples; experts lie within them
    cp: int = 1  # Ranks that share a sequence, by ring attention
    ep: int = 1  # Ranks that share the experts; a divisor of `dp`
    global_batch: int = 1  # Samples of a step
    micro_batch: int = 1  # Samples that pass the pipeline together
    schedule: str = "1f1b"  # Order of the pipeline; one of `overlap.parallel.schedules.FAMILIES`
    chunks: int = 1  # Stages on each rank: 2 or more for "interleaved-1f1b", else what the schedule has
    zero: int = 1  # 0: all ranks have all weights; 1, 2: they share the optimizer; 3: the weights too (FSDP)
    checkpointing: str = "full"  # One of `CHECKPOINTING`, or some of `OPERATIONS` joined by "+"
    sequence_parallel: bool = True  # Whether tokens between the halves of a layer are cut over `tp`
    bucket_bytes: int = BUCKET_BYTES  # Bytes of gradients that are reduced together
    order: str = ORDERS[0]  # One of `ORDERS`
    dtype: str = "bfloat16"  # Type of the factors of matrix products; see `storage_dtype`
    async_tp: bool = False  # Whether exchanges of `tp` overlap the products they belong to, piece by piece
    replicate: int = 1  # Copies of the tensors that `zero` shares, each on a part of the ranks of `dp` (HSDP)
    overlap_gather: bool = False  # Whether new weights are gathered under the next step (ZeRO-1 and 2)

    def __post_init__(self) -> None:
        for name in (
            "tp", "pp", "dp", "cp", "ep", "global_batch", "micro_batch", "chunks", "bucket_bytes", "replicate",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}: expected a whole number from 1, got {value!r}")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero: expected 0, 1, 2 or 3, got {self.zero!r}")
        self.recomputed_operations  # noqa: B018 (refuses unknown operations)
        for name, choices in (("order", ORDERS), ("schedule", tuple(FAMILIES))):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}: expected {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.dp % self.ep:
            raise UsageError(f"ep: expected a divisor of dp ({self.dp}), got {self.ep}")
        self._check_sharing()
        if self.global_batch % (self.dp * self.micro_batch):
            raise UsageError(
                f"global_batch: expected a multiple of dp x micro_batch ({self.dp} x {self.micro_batch}), "
                f"got {self.global_batch}"
            )
        if self.async_tp and not self.sequence_parallel:
            raise UsageError("async_tp requires sequence_parallel: drop --no-sequence-parallel")
        stages = FAMILIES[self.schedule].chunks
        if self.chunks != stages and (stages is not None or self.chunks < 2):
            raise UsageError(f"chunks: expected {stages or '2 or more'} for {self.schedule}, got {self.chunks}")

    def _check_sharing(self) -> None:
        """Check `replicate` and `overlap_gather` against `zero`, `dp` and `ep`."""
        if self.replicate > 1 and not self.zero:
            raise UsageError("replicate: expected zero 1, 2 or 3 beside it: with 0 every rank has a whole copy")
        if (self.dp // self.ep) % self.replicate:
            raise UsageError(f"replicate: expected a divisor of dp / ep ({self.dp} / {self.ep}), got {self.replicate}")
        if self.overlap_gather and self.zero not in (1, 2):
            instead = "3 gathers them layer by layer anyway" if self.zero else "0 gathers none"
            raise UsageError(f"overlap_gather: expected zero 1 or 2 beside it: {instead}")

    @property
    def recomputed_operations(self) -> frozenset[str]:
        """Operations of a layer that are computed again one by one; empty for "none" and for "full"."""
        if self.checkpointing in ("none", "full"):
            return frozenset()
        if self.checkpointing == "selective":
            return _SELECTIVE_OPERATIONS
        names = frozenset(self.checkpointing.split("+")) if isinstance(self.checkpointing, str) else frozenset([""])
        if not names <= frozenset(OPERATIONS):
            raise UsageError(
                f"checkpointing: expected {', '.join(CHECKPOINTING)}, or some of {', '.join(OPERATIONS)} joined by +, "
                f"got {self.checkpointing!r}"
            )
        return names

    @property
    def zero_in_step(self) -> int:
        """Stage of ZeRO within a step: 1 for ZeRO-3 with a pipeline, where gathered weights stay until its end.

        Torch's FSDP does so (torchtitan, reshard_after_forward = "default"), and reduces gradients once in a step.
        """
        return 1 if self.zero == 3 and self.pp > 1 else self.zero

    @property
    def gathers_ahead(self) -> bool:
        """Whether a step begins by gathering the weights that the step before has changed.

        With a pipeline torch's FSDP gathers each layer's weights at its first use in a step.
        """
        return self.overlap_gather or (self.zero == 3 and self.pp > 1)

    @property
    def storage_dtype(self) -> str:
        """Type of weights, activations and gradients: 16 bits also where the factors of products have 8."""
        return "bfloat16" if self.dtype.startswith("float8") else self.dtype

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step for each pipeline."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold equal weights except experts, and average their gradients."""
        return self.dp * self.cp

    @property
    def sharers(self) -> int:
        """Number of ranks that share the tensors of `zero`."""
        return self.replicas // self.replicate

    @property
    def axes(self) -> Mapping[str, int]:
        """Axes of the mesh, outermost first; "dp" without the ranks that share experts, or hold further copies."""
        sizes = {"pp": {"pp": self.pp}, "tp": {"tp": self.tp}}
        copies = {"replicate": self.replicate} if self.replicate > 1 else {}
        sizes["dp"] = {**copies, "dp": self.dp // self.ep // self.replicate, "cp": self.cp, "ep": self.ep}
        return {axis: size for block in self.order.split(".") for axis, size in sizes[block].items()}

    def pipeline_place(self, rank: int) -> int:
        """Return the place of a world rank in its pipeline, from 0."""
        inner = self.world_size
        for axis, size in self.axes.items():
            inner //= size
            if axis == "pp":
                return rank // inner % size
        raise AssertionError("every mesh has the axis pp")

    def pipeline(self) -> PipelineSchedule:
        """Return the schedule of a pipeline's ranks."""
        return _make_schedule(self.schedule, self.pp, self.microbatches, self.chunks)

    def peak_live(self, position: int) -> int:
        """Return the largest number of microbatches whose activations a place in the pipeline holds at once."""
        simulated = min(self.microbatches, _FILLED_MICROBATCHES * self.pp * self.chunks)
        if self.schedule == "1f1b":
            return min(simulated, self.pp - position)
        if self.schedule == "gpipe":
            return self.microbatches
        return _peak_activations(self.schedule, self.pp, simulated, self.chunks)[position]

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Return the stages of a place in the pipeline, lowest first."""
        if FAMILIES[self.schedule].folded:
            return place, 2 * self.pp - 1 - place
        return tuple(range(place, self.pp * self.chunks, self.pp))

    def with_microbatches(self, count: int) -> Layout:
        """Return the layout with a batch of `count` microbatches."""
        return replace(self, global_batch=count * self.dp * self.micro_batch)

    def layers_of(self, model: Model, stage: int) -> range:
        """Return the layers of a stage (0 to pp x chunks - 1): as even as possible, the first stages have one more.

        Layers that predict further tokens are behind the last one.
        """
        stages = self.pp * self.chunks
        least, more = divmod(model.layers, stages)
        start = stage * least + min(stage, more)
        return range(start, start + least + (stage < more) + (model.mtp_layers if stage == stages - 1 else 0))

    def check(self, model: Model) -> None:
        """Check that the degrees divide the figures of a model.

        Raises:
            UsageError: Naming figure and what was expected.
        """
        tokens, tp = model.sequence * self.micro_batch, self.tp
        for name, value, divided, figure in (
            ("tp", tp, "heads", model.heads),
            ("tp", tp, "ffn", model.ffn),
            ("cp", self.cp, "sequence", model.sequence),
            ("ep", self.ep, "experts", model.experts),
            ("cp x tp", self.cp * tp, "sequence x micro_batch", tokens),
        ):
            if figure % value:
                raise UsageError(f"{name}: expected a divisor of {divided} ({figure}) of {model.name}, got {value}")
        if self.ep > 1 and not model.experts:
            raise UsageError(f"ep: {model.name} has no experts; expected 1, got {self.ep}")
        if self.pp * self.chunks > model.layers:
            raise UsageError(
                f"pp: expected at most the layers of {model.name} ({model.layers}), got {self.pp * self.chunks} stages"
            )

    def __str__(self) -> str:
        degrees = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep}
        return " ".join(f"{name}={size}" for name, size in degrees.items() if size > 1 or name in ("tp", "pp", "dp"))


_FILLED_MICROBATCHES = 3  # microbatches for each stage, after which a pipeline holds no more


@lru_cache(maxsize=1024)
def _peak_activations(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the peak of live microbatches by place in the pipeline; cached, as a search asks it often."""
    return tuple(make(name, ranks=ranks, microbatches=microbatches, chunks=chunks).peak_live)


@lru_cache(maxsize=32)
def _make_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    """Return a pipeline schedule; cached, as all ranks of a simulation ask for the same one."""
    return make(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
