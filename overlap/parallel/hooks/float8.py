"""Send gradients as float8, scaled; never added up in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import ml_dtypes
import numpy as np

from ...errors import UsageError
from .operations import (
    Floats,
    Values,
    beside,
    check_floats,
    cut,
    mean_of_pieces,
    scale_for,
    scaled,
    shared_largest,
    unscaled,
)

if TYPE_CHECKING:
    from ..buckets.plan import GradientBucket


@dataclass(frozen=True, kw_only=True)
class Format:
    """A float8: how it is made of float32 and back, eight times as fast as `astype`."""

    dtype: np.dtype[np.generic]  # In ml_dtypes
    mantissa: int  # Its bits
    bias: int  # Of the exponent

    @cached_property
    def top(self) -> float:
        """The largest finite value."""
        return float(ml_dtypes.finfo(self.dtype).max)  # type: ignore[no-untyped-call]

    @cached_property
    def _table(self) -> Floats:
        return np.arange(256, dtype=np.uint8).view(self.dtype).astype(np.float32)

    def narrow(self, values: Floats) -> Values:
        """Round to nearest, ties to even; values beyond the top become the top; infinities and NaN stay."""
        bits = values.view(np.uint32)
        magnitude = np.minimum(bits & np.uint32(0x7FFFFFFF), np.float32(self.top).view(np.uint32))
        shift = np.uint32(23 - self.mantissa)
        code = magnitude >> shift
        code &= np.uint32(1)
        code += (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1)
        code += magnitude
        code >>= shift
        code -= np.uint32((127 - self.bias) << self.mantissa)  # wraps where the next lines overwrite it
        small = magnitude < np.float32(2.0 ** (1 - self.bias)).view(np.uint32)
        # Beside this number float32 has steps as wide as the steps of the smallest float8: adding it rounds to them.
        step = np.float32(2.0 ** (24 - self.bias - self.mantissa))
        code[small] = (magnitude[small].view(np.float32) + step).view(np.uint32) - step.view(np.uint32)
        code |= (bits >> np.uint32(24)) & np.uint32(0x80)
        result: Values = code.astype(np.uint8).view(self.dtype)
        special = np.flatnonzero(~np.isfinite(values))
        result[special] = values[special].astype(self.dtype)
        return result

    def wide(self, values: Values) -> Floats:
        """Return float32."""
        return self._table[values.view(np.uint8)]


FORMATS = {
    "e4m3": Format(dtype=np.dtype(ml_dtypes.float8_e4m3fn), mantissa=3, bias=7),
    "e5m2": Format(dtype=np.dtype(ml_dtypes.float8_e5m2), mantissa=2, bias=15),
}


def float8(format: Literal["e4m3", "e5m2"] = "e4m3") -> Callable[[GradientBucket], Awaitable[Values]]:
    """Return a hook that sends a quarter of the bytes and keeps 4 bits of each gradient ("e5m2": 3).

    Each rank gets the float8 pieces that it has to add up, adds them in float32, and sends its sum on as float8. A
    bucket has one scale, a power of two, which all ranks take from the largest gradient among them, so their replicas
    stay equal. Values saturate, and never wrap; infinities become NaN in "e4m3".

    Gradients below 2**-15 of the largest lose bits, those below 2**-18 are lost ("e5m2": 2**-30, 2**-32). Formats and
    their figures: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433.

    Raises:
        UsageError: For another format.
    """
    if format not in FORMATS:
        raise UsageError(f"format: expected {' or '.join(map(repr, FORMATS))}, got {format!r}")
    chosen = FORMATS[format]

    def narrow(bucket: GradientBucket, values: Values, largest: Values) -> Values:
        return cut(bucket, chosen.narrow(scaled(values, scale_for(largest, chosen.top))))

    def add(pieces: Values) -> Values:
        total = chosen.wide(pieces[0])
        for piece in pieces[1:]:
            total += chosen.wide(piece)
        total /= np.float32(len(pieces))
        return chosen.narrow(total)

    def widen(values: Values, largest: Values, like: Values) -> Values:
        return unscaled(chosen.wide(values[: like.size]), scale_for(largest, chosen.top), like.dtype)

    async def hook(bucket: GradientBucket) -> Values:
        check_floats(bucket, "float8")
        largest = await shared_largest(bucket)
        sent = await beside(bucket, partial(narrow, bucket), bucket.buffer, largest, name="to float8")
        means = await mean_of_pieces(bucket, sent, add)
        return await beside(bucket, widen, means, largest, bucket.buffer, name="from float8")

    return hook
