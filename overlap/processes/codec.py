"""Calls as plain lists of numbers and names, to be told to other processes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import cast

import numpy as np

from ..collectives.call import Call, Pairs, call, uneven_call
from ..collectives.kinds import Collective
from ..errors import OverlapError
from ..runtime.blame.standing import Standing


def pack_call(asked: Call) -> list[object]:
    """Return the list that `unpack_call` makes an equal call of."""
    dtype = None if asked.dtype is None else str(asked.dtype)
    shape = None if asked.shape is None else list(asked.shape)
    pairs, counts = [list(pair) for pair in asked.pairs], list(asked.counts)
    how = [asked.exact, asked.shared, asked.algorithm]
    return [asked.kind.value, asked.op, dtype, shape, asked.size, asked.root, pairs, counts, *how]


def unpack_call(told: Sequence[object]) -> Call:
    """Return the call that a list stands for.

    Raises:
        OverlapError: If it stands for none.
    """
    try:
        kind, op, dtype, shape, size, root, pairs, counts, exact, shared, algorithm = told
        find = uneven_call if counts else call
        return find(
            Collective(kind).value,
            cast("str | None", op),
            None if dtype is None else _dtype(str(dtype)),
            None if shape is None else tuple(int(length) for length in cast("list[int]", shape)),
            int(cast(int, size)),
            int(cast(int, root)),
            _pairs(cast("list[list[int]]", pairs)),
            tuple(int(rows) for rows in cast("list[int]", counts)),
            bool(exact),
            bool(shared),
            None if algorithm is None else str(algorithm),
        )
    except (TypeError, ValueError, OverlapError) as error:
        raise OverlapError(f"a process told of a call that cannot be meant: {error}") from error


def _pairs(told: list[list[int]]) -> Pairs:
    return tuple((int(src), int(dst)) for src, dst in told)


def _dtype(name: str) -> np.dtype[np.generic]:
    if name.startswith(("bfloat", "float8", "float6", "float4", "int2", "int4", "uint2", "uint4")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name, None) or name)
    return np.dtype(name)


# Together well below what fits in a message, whatever is said: of texts in UTF-8, and of ranks that are waited for.
_TEXT_BYTES, _LONGEST_BYTES = 24_000, 400
_RANKS, _LINES, _AWAITED = 128, 2, 16


def pack_standings(standings: Sequence[Standing]) -> list[object]:
    """Return the list that `unpack_standings` makes the same standings of, but for what is too long."""
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


def unpack_standings(told: Sequence[object], ranks: Container[int]) -> list[Standing]:
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
