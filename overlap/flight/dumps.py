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
from pathlib import Path
from typing import Any

from ..errors import UsageError

MOST_BYTES, MOST_OPCODES = 256 << 20, 10_000_000
"""Bounds of one dump: 20,000 operations with 20 frames take 8 million opcodes."""

_MOST_FRAMES, _MOST_TEXT, _MOST_SHAPES = 64, 300, 256
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError)
_NOT_OF_THE_USER = re.compile(r"(^|[/\\])(torch|overlap)[/\\]|^<|importlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operation that one rank issued."""

    rank: int
    group: str  # As the recorder names it
    number: int  # Of collectives in their group, or of messages
    kind: str  # Such as "all_reduce"; "send" and "recv" for messages
    peer: int | None  # Of a message: the other rank of the group
    sizes: tuple[str, str]  # Shapes of inputs and of outputs: "[8], [2, 4]"
    counts: tuple[int, int]  # Elements of inputs and of outputs
    dtypes: tuple[str, str]
    line: str  # Place in the user's program; "" where the dump has no stacks
    state: str  # As recorded: scheduled, started, completed
    done: bool
    created_ns: int

    def __str__(self) -> str:
        """Return the operation with its sizes and dtypes."""
        towards = f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}" if self.peer is not None else ""
        given, made = (f"{dtype} {size}" if size else "" for dtype, size in zip(self.dtypes, self.sizes, strict=True))
        arguments = given if given == made or not made else f"{given} -> {made}" if given else made
        return f"{self.kind} #{self.number}{towards}{f' of {arguments}' if arguments else ''}"

    @property
    def place(self) -> str:
        """Return where it was called, for the end of a phrase."""
        return f" at {self.line}" if self.line else " (its dump has no stacks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The dump of one rank."""

    path: Path
    prefix: str  # The name without the rank: that of one run
    rank: int
    version: str
    calls: tuple[Call, ...]  # In the order of issue
    groups: Mapping[str, tuple[int, ...]]  # Members, where the dump lists them
    names: Mapping[str, str]  # Descriptions of groups


def rank_of(path: Path) -> tuple[str, int] | None:
    """Return the name without the rank, and the rank; None if the name has no number."""
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
            head = file.read(1 << 16)
            file.seek(max(0, path.stat().st_size - 4096))
            ends = head + file.read(4096)
    except OSError:
        return False
    if b'"traceEvents"' in head or b'"deviceProperties"' in head:
        return False
    keys = (b"pg_config", b"nccl_version", b"comm_lib_version", b"collective_seq_id")
    return (head[:1] == b"\x80" or head.lstrip()[:1] == b"{") and any(key in ends for key in keys)


def read_dump(path: Path) -> Dump:
    """Read one file.

    Raises:
        UsageError: Naming the file and the fault.
    """
    named = rank_of(path)
    if named is None:
        raise UsageError(f"{path}: the name of a dump ends with its rank, such as dump_3")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: a dump has at most {MOST_BYTES >> 20} MiB")
        content = path.read_bytes()
        root = plain(content) if content[:1] == b"\x80" else json.loads(content)
        if not isinstance(root, dict) or not isinstance(root.get("entries", []), list) or "version" not in root:
            raise ValueError("no dump of the flight recorder")
        version = _text(root["version"])[:20]
        if version.partition(".")[0] != "2":
            raise UsageError(f"{path}: is of version {version} of the flight recorder; versions 2.x are read")
        groups, names = _groups(root.get("pg_config") or {})
        entries = root.get("entries", [])
        calls = _with_batches(entries, [_call(entry, named[1], names, groups) for entry in entries])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except _DAMAGE as error:
        raise UsageError(f"{path}: is damaged, or no dump: {type(error).__name__}: {str(error)[:200]}") from None
    return Dump(
        path=path, prefix=named[0], rank=named[1], version=version, calls=calls, groups=groups, names=names
    )  # fmt: skip


def _with_batches(entries: Sequence[Any], calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return the operations with the states of their batches.

    Only the end of a batch, which follows its operations under their number, has a state that changes.
    """
    ends: dict[tuple[str, bool, int], Call] = {}
    complete: list[Call] = []
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


def _groups(table: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    members: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for name, about in table.items():
        ranks = about.get("ranks") or "[]"
        listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        if listed:
            members[str(name)] = tuple(sorted({int(rank) for rank in listed}))
        names[str(name)] = _text(about.get("desc", ""))
    return members, names


def _call(entry: Any, rank: int, names: dict[str, str], groups: Mapping[str, tuple[int, ...]]) -> Call:
    group, description = map(_text, entry["process_group"])
    names.setdefault(group, description)
    library, _, operation = _text(entry["profiling_name"]).partition(":")
    kind, _, route = operation.partition(" ")
    message = kind in ("send", "recv")
    state = _text(entry.get("state", ""))
    return Call(
        rank=rank,
        group=group,
        number=int(entry["p2p_seq_id"] if message else entry["collective_seq_id"]),
        kind=kind or library,
        peer=_peer(route, groups.get(group)) if message else None,
        sizes=(_shapes(entry.get("input_sizes")), _shapes(entry.get("output_sizes"))),
        counts=(_count(entry.get("input_sizes")), _count(entry.get("output_sizes"))),
        dtypes=(_types(entry.get("input_dtypes")), _types(entry.get("output_dtypes"))),
        line=_line(entry.get("frames") or ()),
        state=state[:20],
        # Gloo never says that an operation has completed, only that it was retired, also by an error.
        done=state == "completed" or (library == "gloo" and bool(entry.get("retired"))),
        created_ns=int(entry.get("time_created_ns") or 0),
    )


def _peer(route: str, members: Sequence[int] | None) -> int | None:
    ends = re.fullmatch(r"\d+(?:->|<-)(\d+)", route)
    if ends is None:
        return None
    peer = int(ends[1])
    return members[peer] if members is not None and peer < len(members) else peer


def _text(value: Any) -> str:
    """Return a text of bounded length; lists that contain each other many times would make an endless one."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"text expected, got {type(value).__name__}")
    return str(value)[:_MOST_TEXT]


def _shapes(shapes: Any) -> str:
    texts = (str(list(map(int, shape[:_MOST_SHAPES]))) for shape in (shapes or ())[:_MOST_SHAPES])
    return ", ".join(texts)[:_MOST_TEXT]


def _count(shapes: Any) -> int:
    return sum(math.prod(map(int, shape[:_MOST_SHAPES])) for shape in (shapes or ())[:_MOST_SHAPES])


def _types(dtypes: Any) -> str:
    return ", ".join(dict.fromkeys(map(_text, (dtypes or ())[:_MOST_SHAPES])))[:_MOST_TEXT].lower()


def _line(frames: Sequence[Any]) -> str:
    """Return the innermost frame of the user's program, else the innermost one."""
    places = [(_text(frame["filename"]), int(frame["line"]), _text(frame["name"])) for frame in frames[:_MOST_FRAMES]]
    own = next((place for place in places if not _NOT_OF_THE_USER.search(place[0])), None)
    file, line, name = own or (places[0] if places else ("", 0, ""))
    return f"{Path(file).name}:{line} in {name}"[:_MOST_TEXT] if file else ""


def plain(content: bytes) -> Any:
    """Return the plain data of a pickle: numbers, texts, lists, tuples and dicts.

    Raises:
        ValueError: The pickle is truncated or too large, or has an opcode that can make anything else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        begin = marks.pop()
        items = stack[begin:]
        del stack[begin:]
        return items

    def pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
        if not all(isinstance(key, str | int) for key in items[::2]):  # a nested tuple takes for ever to hash
            raise ValueError("refused: a key that is neither text nor number")
        return zip(items[::2], items[1::2], strict=True)

    def last(count: int) -> list[Any]:
        if len(stack) < count:
            raise ValueError("pickle without enough values")
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def put(index: int) -> None:
        memo[index] = stack[-1]

    steps: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
        **dict.fromkeys(_VALUES, stack.append),
        "NONE": lambda _: stack.append(None),
        "NEWTRUE": lambda _: stack.append(True),
        "NEWFALSE": lambda _: stack.append(False),
        "EMPTY_LIST": lambda _: stack.append([]),
        "EMPTY_DICT": lambda _: stack.append({}),
        "EMPTY_TUPLE": lambda _: stack.append(()),
        "MARK": lambda _: marks.append(len(stack)),
        "TUPLE1": lambda _: stack.append(tuple(last(1))),
        "TUPLE2": lambda _: stack.append(tuple(last(2))),
        "TUPLE3": lambda _: stack.append(tuple(last(3))),
        "TUPLE": lambda _: stack.append(tuple(since_mark())),
        "LIST": lambda _: stack.append(since_mark()),
        "DICT": lambda _: stack.append(dict(pairs(since_mark()))),
        "APPEND": lambda _: list.extend(stack[-2], last(1)),
        "APPENDS": lambda _: (items := since_mark(), list.extend(stack[-1], items)),
        "SETITEM": lambda _: (items := last(2), dict.update(stack[-1], pairs(items))),
        "SETITEMS": lambda _: (items := since_mark(), dict.update(stack[-1], pairs(items))),
        **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), put),
        "MEMOIZE": lambda _: put(len(memo)),
        **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda index: stack.append(memo[index])),
    }
    for count, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(content))):
        if opcode.name == "STOP":
            return last(1)[0]
        if count > MOST_OPCODES:
            raise ValueError(f"more than {MOST_OPCODES} opcodes")
        if opcode.name not in steps:
            raise ValueError(f"refused: its opcode {opcode.name} could run code; a dump is plain data")
        steps[opcode.name](argument)
    raise ValueError("pickle without an end")


_VALUES = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8",
)  # fmt: skip
