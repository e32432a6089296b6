"""What operations and computes are given: values, futures of values, and tuples, lists and dicts that hold futures."""

from __future__ import annotations

from typing import Any

from .future import Failure, Future, outcome


def resolve(value: object) -> tuple[object, Failure | None]:
    """Return the outcome of `value`, looking into futures (settled) and into tuples, lists and dicts that hold some."""
    if isinstance(value, Future):
        return outcome(value)
    if not isinstance(value, (tuple, list, dict)) or not any(map(_holds_future, _items(value))):
        return value, None
    resolved = [resolve(item) for item in _items(value)]
    for _, failure in resolved:
        if failure is not None:
            return None, failure
    plain: list[Any] = [item for item, _ in resolved]
    if isinstance(value, dict):
        return dict(zip(value, plain, strict=True)), None
    rebuild = type(value)
    return (rebuild(*plain) if hasattr(value, "_fields") else rebuild(plain)), None  # named tuples take their fields


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []


def _holds_future(value: object) -> bool:
    return isinstance(value, Future) or any(map(_holds_future, _items(value)))
