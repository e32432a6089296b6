"""What a model takes on one rank, measured, and by formula."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .shards import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes that a model keeps on one rank from step to step."""

    parameters: float  # Weights
    gradients: float  # Where they are kept for the optimizer
    optimizer: float  # What it keeps

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer

    def beside(self, expected: ModelMemory) -> str:
        """Return a table of this, as measured, beside what a formula says."""
        rows = [("", "measured", "formula")]
        for name in (*(field.name for field in fields(self)), "total"):
            rows.append((name, f"{getattr(self, name):,.0f} B", f"{getattr(expected, name):,.0f} B"))
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}".rstrip() for a, b, c in rows)


def expected_memory(stage: Stage, ranks: int, *, parameters: int, optimizer: int) -> ModelMemory:
    """Return what each of N ranks keeps of P bytes of parameters, as many of gradients, and S of optimizer state.

    ======  ============  ============  ============
    stage   parameters    gradients     optimizer
    ======  ============  ============  ============
    1       P             P             S / N
    2       P             P / N         S / N
    3       P / N         P / N         S / N
    ======  ============  ============  ============

    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", arXiv 1910.02054,
    section 5.

    Args:
        stage: Of ZeRO.
        ranks: N.
        parameters: P.
        optimizer: S.
    """
    return ModelMemory(
        parameters=parameters / (ranks if stage > 2 else 1),
        gradients=parameters / (ranks if stage > 1 else 1),
        optimizer=optimizer / ranks,
    )
