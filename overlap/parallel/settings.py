"""What a data-parallel model may be asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import UsageError
from .buckets import Hook

__all__ = ["IN_FLIGHT", "Order", "Settings", "Unused"]

Order: TypeAlias = Literal["forward", "fifo"]
Unused: TypeAlias = Literal["error", "zeros"]

IN_FLIGHT = 64
"""Buckets on the wire at once. They are reduced in place, so more of them take no more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `DataParallel`, which says what they mean.

    Raises:
        UsageError: If one of them cannot be meant, naming it.
    """

    bucket_bytes: int | Literal["auto"] | None
    order: Order
    hook: Hook | None
    exact: bool
    clip_norm: float | None
    unused: Unused
    rebuild_buckets: bool
    uneven: bool
    in_flight: int
    ahead: int

    def __post_init__(self) -> None:
        _check_choice("order", self.order, ("forward", "fifo"))
        _check_choice("unused", self.unused, ("error", "zeros"))
        _check_count("in_flight", self.in_flight)
        _check_count("ahead", self.ahead, least=0)
        if self.bucket_bytes not in ("auto", None):
            _check_count("bucket_bytes", self.bucket_bytes)
        if self.exact and self.hook is not None:
            raise UsageError("exact: a hook makes the mean in a way of its own; leave out one of the two")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm: expected a number above 0, got {self.clip_norm!r}")


def _check_choice(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{argument}: expected {' or '.join(map(repr, known))}, got {value!r}")


def _check_count(argument: str, value: object, *, least: int = 1) -> None:
    if not isinstance(value, int) or value < least:
        raise UsageError(f"{argument}: expected a whole number from {least}, got {value!r}")
