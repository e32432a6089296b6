"""Dumps of PyTorch's flight recorder: pickles of plain data, or JSON; a file holds the operations of one rank.

The file's name carries the rank: the number after "rank", else the last number in it. A pickle is interpreted here, by
opcodes that make plain data; any other opcode, such as one that names a class or calls a function, refuses the file.
"""

from __future__ import annotations

import io
import json
import math
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

import msgspec

from ..errors import UsageError

MOST_BYTES, MOST_OPCODES = 256 << 20, 10_000_000
"""Bounds of one dump: 20,000 operations with 20 frames take 8 million opcodes."""

_MOST_FRAMES, _MOST_TEXT, _MOST_SHAPES = 64, 300, 256
_HEAD_BYTES, _TAIL_BYTES = 1 << 16, 1 << 12  # parts of a file that show whether it is a dump
_DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    MemoryError,
    StructError,
)
_NOT_OF_THE_USER = re.compile(r"(^|[/\\])(torch|overlap)[/\\]|^<|importlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedCall:
    """An operation that one rank issued."""

    rank: int
    group: str  # Name that the recorder gives it
    number: int  # Number among the collectives of its group, or among messages
    kind: str  # Such as "all_reduce"; "send" and "recv" for messages
    peer: int | None  # The other rank of a message, in the group; None for a collective
    sizes: tuple[str, str]  # Shapes of inputs and of outputs: "[8], [2, 4]"
    counts: tuple[int, int]  # Elements of inputs and of outputs
    dtypes: tuple[str, str]
    line: str  # Place in the user's program; "" where the dump has no stacks
    state: str  # Recorded state: scheduled, started, completed
    done: bool
    created_ns: int

    def __str__(self) -> str:
        """Return the operation with its sizes and dtypes."""
        towards = f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}" if self.peer is not None else ""
        given, made = (f"{dtype} {size}" if size else "" for dtype, size in zip(self.dtypes, self.sizes, strict=True))
        arguments = given if given == made or not made else f"{given} -> {made}" if given else made
        return f"{self.kind} #{self.number}{towards}{f' of {arguments}' if arguments else ''}"

    @property
    def is_message(self) -> bool:
        """Whether the operation is one end of a message: a send or a receive."""
        return self.kind in ("send", "recv")

    @property
    def place(self) -> str:
        """Return the line of the program that called the operation, for the end of a phrase."""
        return f" at {self.line}" if self.line else " (its dump has no stacks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The dump of one rank."""

    path: Path
    prefix: str  # The name without the rank: that of one run
    rank: int
    version: str
    calls: tuple[DumpedCall, ...]  # In the order of issue
    groups: Mapping[str, tuple[int, ...]]  # Members, where the dump lists them
    names: Mapping[str, str]  # Descriptions of groups


def split_rank(path: Path) -> tuple[str, int] | None:
    """Return a file name with "*" in place of its rank, and the rank; None if the name has no number."""
    stem = re.sub(r"\.(json|pickle|pkl|bin|txt|dump)$", "", path.name)
    matches = list(re.finditer(r"rank[_-]?(\d{1,7})(?!\d)", stem)) or list(re.finditer(r"(\d{1,7})(?!\d)", stem))
    if not matches:
        return None
    last = matches[-1]
    return f"{stem[: last.start(1)]}*{stem[last.end(1) :]}", int(last[1])


def looks_like_dump(path: Path) -> bool:
    """Whether a file begins as a dump of the flight recorder does."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            both_ends = head + file.read(_TAIL_BYTES)
    except OSError:
        return False
    if b'"traceEvents"' in head or b'"deviceProperties"' in head:
        return False
    keys = (b"pg_config", b"nccl_version", b"comm_lib_version", b"collective_seq_id")
    return (head[:1] == b"\x80" or head.lstrip()[:1] == b"{") and any(key in both_ends for key in keys)


def read_dump(path: Path) -> Dump:
    """Read one file.

    Raises:
        UsageError: Naming the file and the fault.
    """
    named = split_rank(path)
    if named is None:
        raise UsageError(f"{path}: the name of a dump ends with its rank, such as dump_3")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: a dump has at most {MOST_BYTES >> 20} MiB; leave it out")
        content = path.read_bytes()
        root = unpickle_plain(content) if content[:1] == b"\x80" else msgspec.json.decode(content)
        if not isinstance(root, dict) or not isinstance(root.get("entries", []), list) or "version" not in root:
            raise ValueError("no dump of the flight recorder")
        version = _bounded_text(root["version"])[:20]
        if version.partition(".")[0] != "2":
            raise UsageError(f"{path}: is of version {version} of the flight recorder; versions 2.x are read")
        groups, names = _parse_groups(root.get("pg_config") or {})
        entries = root.get("entries", [])
        calls = _with_batches(entries, [_parse_call(entry, named[1], names, groups) for entry in entries])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a dump that can be read") from None
    except _DAMAGE as error:
        raise UsageError(
            f"{path}: is damaged, or no dump: {type(error).__name__}: {str(error)[:200]}; leave it out"
        ) from None
    return Dump(
        path=path, prefix=named[0], rank=named[1], version=version, calls=calls, groups=groups, names=names
    )  # fmt: skip


def _with_batches(entries: Sequence[Any], calls: Sequence[DumpedCall]) -> tuple[DumpedCall, ...]:
    """Return the operations of a dump; a batched operation gets the state of its batch.

    Only the end of a batch, which follows its operations under their number, has a state that changes.
    """
    ends: dict[tuple[str, bool, int], DumpedCall] = {}
    complete: list[DumpedCall] = []
    for entry, call in zip(reversed(entries), reversed(calls), strict=True):
        message = bool(entry.get("is_p2p"))
        key = (call.group, message, int(entry["p2p_seq_id" if message else "collective_seq_id"]))
        if call.kind.endswith("coalesced"):
            ends.setdefault(key, call)
        elif (end := ends.get(key)) is not None:
            call = replace(call, state=end.state, done=end.done)
        if not (message and call.kind == "coalesced"):  # ranks of other messages have no such end
            complete.append(call)
    return tuple(reversed(complete))


def _parse_groups(table: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the ranks of each group, where the dump lists them, and the description of each group."""
    members: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for name, about in table.items():
        ranks = about.get("ranks") or "[]"
        listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        if listed:
            members[str(name)] = tuple(sorted({int(rank) for rank in listed}))
        names[str(name)] = _bounded_text(about.get("desc", ""))
    return members, names


def _parse_call(entry: Any, rank: int, names: dict[str, str], groups: Mapping[str, tuple[int, ...]]) -> DumpedCall:
    """Return an operation from its entry in a dump; adds the description of its group to `names`."""
    group, description = map(_bounded_text, entry["process_group"])
    names.setdefault(group, description)
    library, _, operation = _bounded_text(entry["profiling_name"]).partition(":")
    kind, _, route = operation.partition(" ")
    message = kind in ("send", "recv")
    state = _bounded_text(entry.get("state", ""))
    return DumpedCall(
        rank=rank,
        group=group,
        number=int(entry["p2p_seq_id"] if message else entry["collective_seq_id"]),
        kind=kind or library,
        peer=_parse_peer(route, groups.get(group)) if message else None,
        sizes=(_format_shapes(entry.get("input_sizes")), _format_shapes(entry.get("output_sizes"))),
        counts=(_count_elements(entry.get("input_sizes")), _count_elements(entry.get("output_sizes"))),
        dtypes=(_format_dtypes(entry.get("input_dtypes")), _format_dtypes(entry.get("output_dtypes"))),
        line=_find_user_line(entry.get("frames") or ()),
        state=state[:20],
        # Gloo never says that an operation has completed, only that it was retired, also by an error.
        done=state == "completed" or (library == "gloo" and bool(entry.get("retired"))),
        created_ns=int(entry.get("time_created_ns") or 0),
    )


def _parse_peer(route: str, members: Sequence[int] | None) -> int | None:
    """Return the world rank at the other end of a message, from a text such as "0->1"; None if it names none."""
    ends = re.fullmatch(r"\d+(?:->|<-)(\d+)", route)
    if ends is None:
        return None
    peer = int(ends[1])
    return members[peer] if members is not None and peer < len(members) else peer


def _bounded_text(value: Any) -> str:
    """Return a text of bounded length; lists that contain each other many times would make an endless one."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"text expected, got {type(value).__name__}")
    return str(value)[:_MOST_TEXT]


def _format_shapes(shapes: Any) -> str:
    """Return shapes as text, such as "[8], [2, 4]"."""
    texts = (str(list(map(int, shape[:_MOST_SHAPES]))) for shape in (shapes or ())[:_MOST_SHAPES])
    return ", ".join(texts)[:_MOST_TEXT]


def _count_elements(shapes: Any) -> int:
    """Return the number of elements of all shapes together."""
    return sum(math.prod(map(int, shape[:_MOST_SHAPES])) for shape in (shapes or ())[:_MOST_SHAPES])


def _format_dtypes(dtypes: Any) -> str:
    return ", ".join(dict.fromkeys(map(_bounded_text, (dtypes or ())[:_MOST_SHAPES])))[:_MOST_TEXT].lower()


def _find_user_line(frames: Sequence[Any]) -> str:
    """Return the line of the innermost frame of the user's program, else of the innermost frame; "" without."""
    frames = frames[:_MOST_FRAMES]
    found = next((frame for frame in frames if _is_users(frame["filename"])), frames[0] if frames else None)
    if not found or not found["filename"]:
        return ""
    name = re.split(r"[/\\]", _bounded_text(found["filename"]))[-1]
    return f"{name}:{int(found['line'])} in {_bounded_text(found['name'])}"[:_MOST_TEXT]


@lru_cache(maxsize=1 << 12)
def _is_users(filename: Any) -> bool:
    return not _NOT_OF_THE_USER.search(_bounded_text(filename))


def unpickle_plain(content: bytes) -> Any:
    """Return the plain data of a pickle: numbers, texts, lists, tuples and dicts.

    A large dump has millions of opcodes: the frequent ones are carried out here, byte by byte.

    Raises:
        ValueError: The pickle is truncated or too large, or has an opcode that can make anything else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    dicts: dict[bytes, dict[Any, Any]] = {}  # by the opcodes of their items: a stack of calls repeats its frames
    push, at, end = stack.append, 0, len(content)

    def memoize(index: int) -> None:
        """Store the top of the stack in the memo; dicts that were read with an older value are dropped."""
        if index in memo:
            dicts.clear()
        memo[index] = stack[-1]

    for _ in range(MOST_OPCODES):
        if at >= end:
            raise ValueError("pickle without an end")
        code = content[at]
        at += 1
        if code == 0x68:  # BINGET
            push(memo[content[at]])
            at += 1
        elif code == 0x71:  # BINPUT
            memoize(content[at])
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memoize(_LONG(content, at)[0])
            at += 4
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
            push(number(content, at)[0])
            at += size
        elif code in _TO_MARK:
            begin = marks.pop()
            items = stack[begin:]
            del stack[begin:]
            _TO_MARK[code](stack, items)
        elif code == 0x6A:  # LONG_BINGET
            push(memo[_LONG(content, at)[0]])
            at += 4
        elif code == 0x94:  # MEMOIZE
            memoize(len(memo))
        elif code == 0x7D:  # EMPTY_DICT
            if (match := _SMALL_DICT.match(content, at)) is None:
                push({})
                continue
            loads: bytes = match[3]
            if loads not in dicts:
                dicts[loads] = dict(_checked_pairs([_read_value(each, memo) for each in _LOAD.findall(loads)]))
            push(dict(dicts[loads]))
            at = match.end()
            if match[1] or match[2]:
                memoize(match[1][0] if match[1] else _LONG(match[2], 0)[0])
        elif code == 0x5D:  # EMPTY_LIST
            push([])
        elif code == 0x61:  # APPEND
            item = stack.pop()
            list.append(stack[-1], item)
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code == 0x2E:  # STOP
            return stack[-1]
        else:
            at = _apply_rare_opcode(content, at, stack)
    raise ValueError(f"more than {MOST_OPCODES} opcodes")


def _read_value(load: bytes, memo: Mapping[int, Any]) -> Any:
    """Return the number that an opcode carries, or the value that it takes from the memo."""
    if load[0] in _NUMBERS:
        return _NUMBERS[load[0]][1](load, 1)[0]
    return memo[load[1] if load[0] == 0x68 else _LONG(load, 1)[0]]


def _apply_rare_opcode(content: bytes, at: int, stack: list[Any]) -> int:
    """Act on an opcode that dumps seldom have; return the position of the next one."""
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
    elif step := _STEPS[name]:
        count, make = step
        if len(stack) < count:
            raise ValueError("pickle without enough values")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        make(stack, items)
    return at


def _checked_pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Return keys and values in pairs; refuse keys that are neither text nor number."""
    if not _KEYS.issuperset(map(type, items[::2])):  # a nested tuple takes for ever to hash
        raise ValueError("refused: a key that is neither text nor number")
    return zip(items[::2], items[1::2], strict=True)


_LOAD = re.compile(rb"[hK].|M..|[jJ]....", re.DOTALL)
"""BINGET, BININT1, BININT2, LONG_BINGET, BININT."""
_SMALL_DICT = re.compile(rb"(?:q(.)|r(....))?\(((?:[hK].|M..|[jJ]....){2,64})u", re.DOTALL)
"""Rest of a dict of such values after EMPTY_DICT: BINPUT or LONG_BINPUT, MARK, the values, SETITEMS."""
_KEYS = {str, int, bool}
_Step = Callable[[list[Any], list[Any]], object]
_LONG = Struct("<I").unpack_from
_NUMBERS = {
    code: (each.size, each.unpack_from)
    for code, each in ((0x4B, Struct("B")), (0x4D, Struct("<H")), (0x4A, Struct("<i")), (0x47, Struct(">d")))
}
"""Opcodes with a number (BININT1, BININT2, BININT, BINFLOAT): its bytes, and how it is read."""
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_TO_MARK: dict[int, _Step] = {
    0x75: lambda stack, items: dict.update(stack[-1], _checked_pairs(items)),  # SETITEMS
    0x65: lambda stack, items: list.extend(stack[-1], items),  # APPENDS
    0x74: lambda stack, items: stack.append(tuple(items)),  # TUPLE
    0x6C: lambda stack, items: stack.append(items),  # LIST
    0x64: lambda stack, items: stack.append(dict(_checked_pairs(items))),  # DICT
}
"""Opcodes that take all values from the last mark on."""
_VALUES = ("INT", "LONG", "LONG1", "LONG4", "FLOAT", "UNICODE", "BINUNICODE8")
_STEPS: dict[str, tuple[int, _Step] | None] = {
    "PROTO": None,
    "FRAME": None,
    "EMPTY_TUPLE": (0, lambda stack, _: stack.append(())),
    "TUPLE1": (1, lambda stack, items: stack.append(tuple(items))),
    "TUPLE2": (2, lambda stack, items: stack.append(tuple(items))),
    "TUPLE3": (3, lambda stack, items: stack.append(tuple(items))),
    "SETITEM": (2, lambda stack, items: dict.update(stack[-1], _checked_pairs(items))),
}
"""Opcodes, the number of values that they take, and their meaning."""
