"""Time of a rank's computes by their kind: matrix products, fused attention, and work that the memory limits. Pure.

The figures are those of single kernels, from published benchmarks, in the machine file; `sustained` is the share of
them that is left in a whole training step, where clocks fall with the power and every product waits for the last one.
Where an operator limits the power of a chip, its clocks fall further: power grows with the third power of the clock,
because the voltage rises with it (Mudge, Power: a first-class architectural design constraint, IEEE Computer 34/4).

A product takes `start_s`, and its operations at the rate of a product that never ends (Hockney's two parameters: r_inf
and the size of half the performance). On 28 published products of an H100, from 256 to 13312 wide, that is 6.6 % off in
the median, 14 % at worst (`published/products.toml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topology import Cluster
from topology.machine import Chip

from ..simulation.compute_cost import short_dtype

# FlashAttention-2 on an A100, causal, forward: 143.7 TFLOP/s at 1,024 tokens and 158 at 4,096
# (liangan1/GPU_travel:performance/flash-attn/README.md) are those of r / (1 + h / tokens) with r = 163 and this h.
_HALF_TOKENS = 141
_TWO_BYTES = "bf16"  # the products of a dtype that the machine file lacks, and attention, are in two bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Rate of matrix products in one dtype."""

    flops_per_s: float  # of a product that never ends
    start_s: float  # of any product


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a rank computes with."""

    products: Mapping[str, Rate]  # by dtype
    attention_flops_per_s: float  # of fused attention
    bytes_per_s: float  # of memory, as element-wise computes reach it
    share_beside_collectives: float = 1.0  # share of these rates that is left while the rank communicates

    @classmethod
    def of(cls, cluster: Cluster) -> Device | None:
        """Read the device of a rank; None if the machine file has no measured products."""
        chip, shares = cluster.machine.chip, cluster.ranks_per_device
        memory = cluster.memory_bytes_per_s()
        if not chip.products or memory is None:
            return None
        sustained = (chip.sustained.value if chip.sustained else 1.0) * _clock_share(chip)
        products = {
            each.kind: Rate(flops_per_s=each.flops_per_s.value * sustained / shares, start_s=each.start_s.value)
            for each in chip.products
        }
        plain = products.get(_TWO_BYTES) or next(iter(products.values()))
        fused = chip.attention_flops_per_s
        return cls(
            products=products,
            attention_flops_per_s=fused.value * sustained / shares if fused else plain.flops_per_s / 2,
            bytes_per_s=memory * (chip.memory_efficiency.value if chip.memory_efficiency else 1.0),
            share_beside_collectives=chip.beside_collectives.value if chip.beside_collectives else 1.0,
        )

    def product_s(self, m: float, n: float, k: float, dtype: str, itemsize: int) -> float:
        """Return the time of a product of m x k and k x n numbers, including its reads and writes of memory.

        Args:
            m: Rows of the first factor and of the result.
            n: Columns of the second factor and of the result.
            k: Numbers that each sum has.
            dtype: Type of the factors, as numpy or the machine file calls it.
            itemsize: Bytes of a number of the result, and of the factors as they lie in memory.
        """
        if not m * n * k:
            return 0.0
        rate = self.products.get(short_dtype(dtype)) or self.products[self._fallback_dtype]
        moved_s = (m * k + k * n + m * n) * itemsize / self.bytes_per_s
        return max(rate.start_s + 2.0 * m * n * k / rate.flops_per_s, moved_s)

    @property
    def _fallback_dtype(self) -> str:
        """Dtype whose rate stands for dtypes without one: bf16 if it was measured, else the first one."""
        return _TWO_BYTES if _TWO_BYTES in self.products else next(iter(self.products))

    def attention_s(self, flops: float, tokens: float) -> float:
        """Return the time of fused attention of `flops` operations; each query attends to at most `tokens` keys."""
        return flops * (1 + _HALF_TOKENS / max(tokens, 1.0)) / self.attention_flops_per_s if flops else 0.0

    def elementwise_s(self, nbytes: float) -> float:
        """Return the time of element-wise work that reads and writes `nbytes` bytes of memory."""
        return nbytes / self.bytes_per_s


def _clock_share(chip: Chip) -> float:
    """Return the share of its full clock that a chip keeps under its power limit; 1 without such a limit."""
    if chip.power_w is None or chip.power_limit_w is None:
        return 1.0
    return float(min(1.0, chip.power_limit_w.value / chip.power_w.value) ** (1 / 3))
