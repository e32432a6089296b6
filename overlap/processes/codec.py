"""Plain values of control messages: calls as tuples, and texts and standings cut so that they fit into one message."""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives.call import Call, call, uneven_call
from ..collectives.kinds import Collective
from ..errors import OverlapError
from ..runtime.blame.standing import Standing
from ..runtime.forms import dtype_of, pack_form, unpack_form
from .messages import PlainCall

# Limits of one message, which stays well below its limit: of texts in UTF-8, of ranks, and of ranks waited for.
_TEXT_BYTES, _LONGEST_BYTES = 24_000, 400
_RANKS, _STANDING_LINES, _AWAITED = 128, 2, 16
_LINE_BYTES, _LINES = 500, 24


def pack_call(asked: Call) -> PlainCall:
    """Return the values that `unpack_call` makes an equal call of."""
    dtype = None if asked.dtype is None else str(asked.dtype)
    shape = None if asked.shape is None else list(asked.shape)
    pairs, counts = list(asked.pairs), list(asked.counts)
    how = asked.exact, asked.shared, asked.algorithm, pack_form(asked.form)
    return asked.kind.value, asked.op, dtype, shape, asked.size, asked.root, pairs, counts, *how


def unpack_call(told: PlainCall) -> Call:
    """Return the call that the values stand for.

    Raises:
        OverlapError: They stand for none.
    """
    kind, op, dtype, shape, size, root, pairs, counts, exact, shared, algorithm, form = told
    find = uneven_call if counts else call
    try:
        named = None if dtype is None else dtype_of(dtype)
        extent = None if shape is None else tuple(shape)
        return find(
            Collective(kind).value, op, named, extent, size, root, tuple(pairs), tuple(counts), exact, shared,
            algorithm, unpack_form(form),
        )  # fmt: skip
    except (TypeError, ValueError, OverlapError) as error:
        raise OverlapError(f"a call that cannot be meant: {error}") from error


def cut(text: str, limit_bytes: int = 8_000, *, last: bool = False) -> str:
    """Return the first or the last part of a text that takes at most `limit_bytes` in UTF-8."""
    encoded = text.encode(errors="replace")
    return (encoded[-limit_bytes:] if last else encoded[:limit_bytes]).decode(errors="ignore")


def cut_lines(lines: Sequence[str]) -> list[str]:
    """Return the first lines, each cut, and how many there are more."""
    told = [cut(line, _LINE_BYTES) for line in lines[:_LINES]]
    return told if len(lines) <= _LINES else [*told, f"and {len(lines) - _LINES} lines more"]


def cut_standings(standings: Sequence[Standing]) -> list[Standing]:
    """Return the standings of the first ranks, with cut texts."""
    told = standings[:_RANKS]
    limit_bytes = min(_LONGEST_BYTES, _TEXT_BYTES // ((_STANDING_LINES + 1) * max(1, len(told))))
    return [
        Standing(
            rank=each.rank,
            lines=tuple(cut(line, limit_bytes) for line in each.lines[:_STANDING_LINES]),
            awaits=tuple(each.awaits[:_AWAITED]),
            busy=cut(each.busy, limit_bytes),
            error=cut(each.error, limit_bytes),
        )
        for each in told
    ]
