"""Reader of pickles of plain data, by hand: numbers, texts, lists, tuples and dicts.

A pickle is interpreted by the opcodes that make plain data; any other opcode, such as one that names a class or calls a
function, refuses the file.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any

MOST_OPCODES = 10_000_000
"""Bound of one pickle: 20,000 operations with 20 frames take 8 million opcodes."""


def unpickle_plain(content: bytes) -> Any:
    """Return the plain data of a pickle: numbers, texts, lists, tuples and dicts.

    A large dump has millions of opcodes, so the frequent ones are executed here, without a call; `pickletools` decodes
    the rare ones.

    Raises:
        ValueError: The pickle is truncated or too large, or has an opcode that can make anything else.
    """
    # The machine of a pickle: a stack of values, lengths of the stack at each MARK, and values stored for later use.
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    push, at, end = stack.append, 0, len(content)
    for _ in range(MOST_OPCODES):
        if at >= end:
            raise ValueError("pickle without an end")
        code = content[at]
        at += 1
        if code == 0x68:  # BINGET
            push(memo[content[at]])
            at += 1
        elif code in _PUTS:
            # The index is in one byte (BINPUT), in four (LONG_BINPUT), or the next free one (MEMOIZE).
            index = content[at] if code == 0x71 else len(memo) if code == 0x94 else _LONG(content, at)[0]
            at += _PUTS[code]
            memo[index] = stack[-1]
        elif code in (0x58, 0x8C):  # BINUNICODE, SHORT_BINUNICODE
            begin = at + (4 if code == 0x58 else 1)
            at = begin + (_LONG(content, at)[0] if code == 0x58 else content[at])
            if at > end:
                raise ValueError("pickle without an end")
            push(content[begin:at].decode("utf-8", "surrogatepass"))
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code in _NUMBERS:
            size, number = _NUMBERS[code]
            push(*number(content, at))
            at += size
        elif code in _TO_MARK:
            begin = marks.pop()
            items = stack[begin:]
            del stack[begin:]
            _TO_MARK[code](stack, items)
        elif code == 0x6A:  # LONG_BINGET
            push(memo[_LONG(content, at)[0]])
            at += 4
        elif code == 0x7D:  # EMPTY_DICT
            push({})
        elif code == 0x5D:  # EMPTY_LIST
            push([])
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code == 0x2E:  # STOP
            return stack[-1]
        else:
            at = _apply_rare_opcode(content, at, stack)
    raise ValueError(f"has more values than a dump (more than {MOST_OPCODES} pickle opcodes)")


def _apply_rare_opcode(content: bytes, at: int, stack: list[Any]) -> int:
    """Execute an opcode that dumps seldom have, and return the position of the next one; `at` is that of its argument.

    Raises ValueError if it can make more than plain data, or if the stack has too few values for it.
    """
    opcode = _OPCODES.get(chr(content[at - 1]))
    name = opcode.name if opcode is not None else f"{content[at - 1]:#x}"
    if opcode is None or not (name in _VALUES or name in _STEPS):
        raise ValueError(f"refused: its opcode {name} could run code; a dump is plain data")
    argument = None
    if opcode.arg is not None:
        stream = io.BytesIO(content)  # shares the bytes
        stream.seek(at)
        argument, at = opcode.arg.reader(stream), stream.tell()
    if name in _VALUES:
        stack.append(argument)
    # None: the opcode only describes the pickle, and makes nothing.
    elif step := _STEPS[name]:
        count, make = step
        if len(stack) < count:
            raise ValueError("pickle without enough values")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        make(stack, items)
    return at


def _checked_pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Return (key, value) pairs of [key, value, ...]; raise ValueError if a key is neither text nor number."""
    if not _KEYS.issuperset(map(type, items[::2])):  # hashing a deeply nested tuple could take for ever
        raise ValueError("refused: a key that is neither text nor number")
    return zip(items[::2], items[1::2], strict=True)


_KEYS = {str, int, bool}
_Step = Callable[[list[Any], list[Any]], object]
_LONG = Struct("<I").unpack_from
_NUMBERS = {
    code: (each.size, each.unpack_from)
    for code, each in ((0x4B, Struct("B")), (0x4D, Struct("<H")), (0x4A, Struct("<i")), (0x47, Struct(">d")))
}
"""Opcodes with a number (BININT1, BININT2, BININT, BINFLOAT): its bytes, and how it is read."""
_PUTS = {0x71: 1, 0x72: 4, 0x94: 0}
"""Opcodes that store the top of the stack in the memo (BINPUT, LONG_BINPUT, MEMOIZE): bytes of their index."""
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_TO_MARK: dict[int, _Step] = {
    0x75: lambda stack, items: dict.update(stack[-1], _checked_pairs(items)),  # SETITEMS
    0x65: lambda stack, items: list.extend(stack[-1], items),  # APPENDS
    0x74: lambda stack, items: stack.append(tuple(items)),  # TUPLE
    0x6C: lambda stack, items: stack.append(items),  # LIST
    0x64: lambda stack, items: stack.append(dict(_checked_pairs(items))),  # DICT
}
"""Opcodes that take all values from the last mark on: (stack without them, these values)."""
_VALUES = ("INT", "LONG", "LONG1", "LONG4", "FLOAT", "UNICODE", "BINUNICODE8")
_STEPS: dict[str, tuple[int, _Step] | None] = {
    "PROTO": None,
    "FRAME": None,
    "APPEND": (1, lambda stack, items: list.append(stack[-1], *items)),
    "EMPTY_TUPLE": (0, lambda stack, _: stack.append(())),
    "TUPLE1": (1, lambda stack, items: stack.append(tuple(items))),
    "TUPLE2": (2, lambda stack, items: stack.append(tuple(items))),
    "TUPLE3": (3, lambda stack, items: stack.append(tuple(items))),
    "SETITEM": (2, lambda stack, items: dict.update(stack[-1], _checked_pairs(items))),
}
"""Opcodes, the number of values that each takes from the stack, and what it does; None: nothing."""
