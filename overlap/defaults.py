"""Figures of the runtime and the strategies that predictions share."""

from __future__ import annotations

DEFAULT_WINDOW = 8
"""Operations of a stream that move at the same time; the next one waits for the oldest."""

FIRST_BUCKET_BYTES = 1 << 20
"""Bytes with which the first bucket of gradients of a step is full."""

INLINE_BYTES = 2 << 20
"""Bytes, over all arrays read, up to which the event loop does the work itself, quicker than with threads, which take
about 100 us (measured: float32 sums of 512 KiB on 2 ranks 86 us against 174, of 1 MiB even)."""

SLICED_BYTES = 64 << 10
"""Bytes from which each of three or more processes reduces a slice only; `SLICED_BYTES` of
transports/shared_memory/native/collectives.c."""
