"""Figures of the runtime and the strategies that predictions share."""

from __future__ import annotations

DEFAULT_WINDOW = 8
"""Operations of a stream that may be in flight; the next operation waits until the oldest has finished."""

FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket of gradients of a step."""

INLINE_BYTES = 2 << 20
"""Up to this many bytes, over all arrays read, the event loop does the work of a collective itself. That is quicker
than in threads, whose start takes about 100 us (measured: a float32 sum of 512 KiB on 2 ranks takes 86 us against 174,
one of 1 MiB the same)."""
