"""Where ranks stand as plain lists, to be told to other processes; what is long is cut, to fit in one message."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..errors import OverlapError
from ..runtime.standing import Standing

# Together well below what fits in a message, whatever is said: of texts in UTF-8, and of ranks that are waited for.
_TEXT_BYTES, _LONGEST_BYTES = 24_000, 400
_RANKS, _LINES, _AWAITED = 128, 2, 16


def pack(standings: Sequence[Standing]) -> list[object]:
    """Return the list that `unpack` makes the same standings of, but for what is too long."""
    told = standings[:_RANKS]
    limit_bytes = min(_LONGEST_BYTES, _TEXT_BYTES // ((_LINES + 1) * max(1, len(told))))
    return [
        [
            each.rank,
            [cut(line, limit_bytes) for line in each.lines[:_LINES]],
            list(each.awaits[:_AWAITED]),
            cut(each.busy, limit_bytes),
        ]
        for each in told
    ]


def unpack(told: Sequence[object], ranks: Container[int]) -> list[Standing]:
    """Return the standings that a process has told.

    Args:
        told: What it said.
        ranks: Those that are its own.

    Raises:
        OverlapError: If it makes no sense, or is about others.
    """
    found = []
    for each in told:
        match each:
            case [int(rank), [*lines], [*awaits], str(busy)] if (
                rank in ranks and _are(lines, str) and _are(awaits, int)
            ):
                found.append(Standing(rank=rank, lines=tuple(map(str, lines)), awaits=_whole(awaits), busy=busy))
            case _:
                raise OverlapError(f"a process told where a rank stands in a way that cannot be meant: {each!r:.200}")
    return found


def _whole(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(value for value in values if isinstance(value, int))


def _are(values: Sequence[object], kind: type) -> bool:
    return all(type(value) is kind for value in values)


def cut(text: str, limit_bytes: int = 8_000, *, last: bool = False) -> str:
    """Return the first or the last part of a text that takes so many bytes, whatever characters are in it."""
    encoded = text.encode(errors="replace")
    return (encoded[-limit_bytes:] if last else encoded[:limit_bytes]).decode(errors="ignore")
