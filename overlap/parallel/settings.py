"""The arguments that models with averaged gradients share, and checks of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import isfunction, signature
from typing import Literal, TypeAlias

from ..errors import UsageError
from ..runtime.group import Group
from ..runtime.rank import Rank
from .buckets.plan import Hook

Unused: TypeAlias = Literal["error", "zeros"]
Batch: TypeAlias = Literal["rank", "global"]

IN_FLIGHT = 64
"""Default number of buckets on the wire at once. Buckets are reduced in place, so this costs no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments that `DataParallel` and `Sharded` share; their docstrings explain them.

    Raises:
        UsageError: Naming the argument that is invalid.
    """

    bucket_bytes: int | None
    hook: Hook | None
    exact: bool
    clip_norm: float | None
    clip_group: Group | None
    clip_copies: Mapping[str, int] | None
    unused: Unused
    rebuild_buckets: bool
    uneven: bool
    in_flight: int
    ahead: int
    batch: Batch

    def __post_init__(self) -> None:
        _check_choice("unused", self.unused, ("error", "zeros"))
        _check_choice("batch", self.batch, ("rank", "global"))
        if self.batch == "global" and self.uneven:
            raise UsageError("batch: 'global' weighs ranks by their samples, uneven=True by their steps; leave out one")
        check_count("in_flight", self.in_flight)
        check_count("ahead", self.ahead, least=0)
        if self.bucket_bytes is not None:
            check_count("bucket_bytes", self.bucket_bytes)
        if self.exact and self.hook is not None:
            raise UsageError("exact: a hook makes the mean in a way of its own; leave out one of the two")
        _check_hook(self.hook)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm: expected a number above 0, got {self.clip_norm!r}")
        if self.clip_norm is None and (self.clip_group is not None or self.clip_copies):
            which = "clip_copies" if self.clip_group is None else "clip_group"
            raise UsageError(f"{which}: it says whose gradients count in clip_norm, which is None; give that too")
        for name, copies in (self.clip_copies or {}).items():
            check_count(f"clip_copies[{name!r}]", copies)


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices; the `UsageError` names the argument."""
    if value not in choices:
        raise UsageError(f"{argument}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def _check_hook(hook: object) -> None:
    """Refuse a hook that is no function of a bucket, such as `bfloat16` in the place of `bfloat16()`; None passes."""
    if hook is None:
        return
    name = getattr(hook, "__name__", type(hook).__name__)
    if not callable(hook):
        raise UsageError(f"hook: expected an async function of a bucket, got {name}")
    # A hook has an argument, the bucket. A function that can be called without arguments must be one that makes hooks.
    if isfunction(hook) and all(each.default is not each.empty for each in signature(hook).parameters.values()):
        raise UsageError(f"hook: {name} makes a hook, and is none; write hook={name}()")


def resolve_group(rank: Rank, group: Group | None) -> Group:
    """Return `group`, or the group of all ranks if it is None.

    Raises:
        UsageError: `group` is no group, or `rank` is no rank.
    """
    check_is_rank(rank)
    if group is not None and not isinstance(group, Group):
        raise UsageError(f"group: expected one, such as rank.group([0, 1]) or mesh['dp'], got {group!r}")
    return group or rank.world


def check_is_rank(rank: object) -> None:
    """Refuse an argument `rank` that is no rank.

    Raises:
        UsageError: With the type of the value.
    """
    if not isinstance(rank, Rank):
        raise UsageError(f"rank: expected the rank that main() is given, got one of type {type(rank).__name__}")


def check_count(argument: str, value: object, *, least: int = 1) -> None:
    """Refuse a value that is no integer, or less than `least`.

    Args:
        argument: Name of the argument, for the error.
        value: The value; a bool is no number.
        least: The smallest number that is allowed.

    Raises:
        UsageError: Naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{argument}: expected a whole number from {least}, got {value!r}")
