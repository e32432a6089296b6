"""Dumps of PyTorch's flight recorder: pickles of plain data, or JSON; a file holds the operations of one rank.

The file's name carries the rank: the number after "rank", else the last number in it. `views_of_dumps` turns the dumps
of a run into views for the judge.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import error as StructError
from typing import Any

import msgspec
from msgspec import structs

from ..errors import UsageError
from ..ranklist import format_rank_list
from ..waits.ends import CallRecord, End, EndState, RankView
from .pickles import unpickle_plain

MOST_BYTES = 256 << 20  # of one dump

_MOST_FRAMES, _MOST_TEXT, _MOST_SHAPES = 64, 300, 256
_HEAD_BYTES, _TAIL_BYTES = 1 << 16, 1 << 12  # parts of a file that show whether it is a dump
_DAMAGE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError, MemoryError, StructError)
_GLOO = "gloo"
_NOT_OF_THE_USER = re.compile(r"(^|[/\\])(torch|overlap)[/\\]|^<|importlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The dump of one rank."""

    path: Path
    prefix: str  # File name with "*" in place of the rank; dumps of one run share it
    rank: int
    version: str
    ends: tuple[End, ...]  # This rank's operations; `call.key` is the name of the group in the dump
    groups: Mapping[str, tuple[int, ...]]  # World ranks of each group whose members the dump lists
    is_gloo: bool  # Whether any operation was carried out by gloo


def split_rank_from_name(path: Path) -> tuple[str, int] | None:
    """Return a file name with "*" in place of its rank, and the rank, or None if the name has no number.

    "nccl_trace_rank_3.pkl" gives ("nccl_trace_rank_*", 3).
    """
    stem = re.sub(r"\.(json|pickle|pkl|bin|txt|dump)$", "", path.name)
    matches = list(re.finditer(r"rank[_-]?(\d{1,7})(?!\d)", stem)) or list(re.finditer(r"(\d{1,7})(?!\d)", stem))
    if not matches:
        return None
    last = matches[-1]
    return f"{stem[: last.start(1)]}*{stem[last.end(1) :]}", int(last[1])


def looks_like_dump(path: Path) -> bool:
    """Whether a file looks like a dump of the flight recorder, by its beginning and its last bytes.

    False for traces, and for files that cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            both_ends = head + file.read(_TAIL_BYTES)
    except OSError:
        return False
    if b'"traceEvents"' in head or b'"deviceProperties"' in head:  # a trace of PyTorch's profiler
        return False
    keys = (b"pg_config", b"nccl_version", b"comm_lib_version", b"collective_seq_id")
    # A pickle begins with 0x80, JSON with a brace.
    return (head[:1] == b"\x80" or head.lstrip()[:1] == b"{") and any(key in both_ends for key in keys)


def read_dump(path: Path) -> Dump:
    """Read a dump of the flight recorder. The file's name must have the rank, such as "dump_3".

    Raises:
        UsageError: The file cannot be read, is no dump, or is of another version. The message names file and fault.
    """
    named = split_rank_from_name(path)
    if named is None:
        raise UsageError(f"{path}: the name of a dump ends with its rank, such as dump_3")
    prefix, rank = named
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: a dump has at most {MOST_BYTES >> 20} MiB; leave it out")
        content = path.read_bytes()
        root = unpickle_plain(content) if content[:1] == b"\x80" else msgspec.json.decode(content)
        if not isinstance(root, dict) or not isinstance(root.get("entries", []), list) or "version" not in root:
            raise ValueError("no dump of the flight recorder")
        version = _bounded_text(root["version"])[:20]
        if version.partition(".")[0] != "2":
            raise UsageError(f"{path}: is of version {version} of the flight recorder, not 2.x; leave it out")
        groups = _parse_groups(root.get("pg_config") or {})
        entries = root.get("entries", [])
        ends = _apply_batch_states(entries, [_parse_end(entry, rank, groups) for entry in entries])
        is_gloo = any(_bounded_text(entry["profiling_name"]).startswith(_GLOO) for entry in entries)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a dump that can be read") from None
    except _DAMAGE as error:
        raise UsageError(
            f"{path}: is damaged, or no dump: {type(error).__name__}: {str(error)[:200]}; leave it out"
        ) from None
    return Dump(path=path, prefix=prefix, rank=rank, version=version, ends=ends, groups=groups, is_gloo=is_gloo)


def _apply_batch_states(entries: Sequence[Any], ends: Sequence[End]) -> tuple[End, ...]:
    """Return the operations of a dump; each operation of a batch gets the state of the batch.

    The recorder updates only the entry "coalesced", which it writes after the operations of a batch, under the same
    number.
    """
    states: dict[tuple[str, bool, int], EndState] = {}  # of batches, by (group, whether of messages, number)
    complete: list[End] = []
    for entry, end in zip(reversed(entries), reversed(ends), strict=True):
        message = bool(entry.get("is_p2p"))
        key = (end.call.key, message, int(entry["p2p_seq_id" if message else "collective_seq_id"]))
        if end.call.op.endswith("coalesced"):
            # Read backwards, the entry of the batch comes before its operations.
            states.setdefault(key, end.state)
        elif key in states:
            end = structs.replace(end, state=states[key])
        # The batch of messages itself is left out: it is no operation that meets one of another rank.
        if not (message and end.call.op == "coalesced"):
            complete.append(end)
    return tuple(reversed(complete))


def _parse_groups(table: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group, ascending, from the table "pg_config"; groups without ranks are left out."""
    members: dict[str, tuple[int, ...]] = {}
    for name, about in table.items():
        ranks = about.get("ranks") or "[]"
        listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        if listed:
            members[str(name)] = tuple(sorted({int(rank) for rank in listed}))
    return members


def _parse_end(entry: Any, rank: int, groups: Mapping[str, tuple[int, ...]]) -> End:
    """Return an operation of a rank from its entry, of any form; raise one of `_DAMAGE` if it is damaged."""
    group, description = map(_bounded_text, entry["process_group"])
    library, _, operation = _bounded_text(entry["profiling_name"]).partition(":")
    op, _, route = operation.partition(" ")
    message, members = op in ("send", "recv"), groups.get(group, ())
    if message:
        peer = _parse_peer(route, members)
        members = () if peer is None else (rank, peer)
        # Members of a message are its source and its destination.
        members = members if op == "send" else members[::-1]
    recorded, is_gloo = _bounded_text(entry.get("state", "")), library == _GLOO
    # Gloo records neither start nor completion, only that an operation was retired, whether it ended well or not.
    state = EndState.QUEUED if recorded == "scheduled" else EndState.UNKNOWN
    if recorded == "completed" or (is_gloo and entry.get("retired")):
        state = EndState.DONE
    elif recorded == ("scheduled" if is_gloo else "started"):
        state = EndState.WAITING
    call = CallRecord(
        op=op or library, site=_find_user_line(entry.get("frames") or ()), key=group, members=members,
        group=group if description in ("", "undefined") else description, form=_parse_form(entry, op),
    )  # fmt: skip
    number = int(entry["p2p_seq_id"] if message else entry["collective_seq_id"])
    return End(rank=rank, call=call, seq=number, state=state, issued_ns=int(entry.get("time_created_ns") or 0))


def _parse_form(entry: Any, op: str) -> str:
    """Return the dtype and numbers of elements that must be equal on all ranks, such as "float32 [4] -> [8]".

    It is only the dtype if ranks may have different sizes, only the size for scatter and gather, and "" if the entry
    has neither arrays nor types.
    """
    given, made = (_count_elements(entry.get(f"{side}_sizes")) for side in ("input", "output"))
    types = [_format_dtypes(entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    if op in ("send", "recv"):
        given, made, types = (given, given, types[:1]) if op == "send" else (made, made, types[1:])
    # Where each rank has sizes of its own, only the dtype must be equal.
    uneven = op.startswith(("all_to_all", "alltoall")) or "_v" in op
    if uneven or not (given or made or any(types)):
        return types[-1] if uneven else ""
    if op in ("scatter", "gather"):  # the root alone has an array for all
        return f"[{made if op == 'scatter' else given}]"
    return f"{types[-1] or types[0]} [{given}]{f' -> [{made}]' if made != given else ''}"


def _parse_peer(route: str, members: Sequence[int]) -> int | None:
    """Return the peer in a route such as "0->1" or "1<-0", or None.

    It is the world rank if `members` has it, otherwise the rank inside the group.
    """
    ends = re.fullmatch(r"\d+(?:->|<-)(\d+)", route)
    if ends is None:
        return None
    peer = int(ends[1])
    return members[peer] if peer < len(members) else peer


def _bounded_text(value: Any) -> str:
    """Return at most `_MOST_TEXT` characters of a text or number; raise TypeError for others (texts without end)."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"text expected, got {type(value).__name__}")
    return str(value)[:_MOST_TEXT]


def _count_elements(shapes: Any) -> int:
    """Return the number of elements of all shapes together: [[2, 3], [4]] gives 10."""
    return sum(math.prod(map(int, shape[:_MOST_SHAPES])) for shape in (shapes or ())[:_MOST_SHAPES])


def _format_dtypes(dtypes: Any) -> str:
    return ", ".join(dict.fromkeys(map(_bounded_text, (dtypes or ())[:_MOST_SHAPES])))[:_MOST_TEXT].lower()


def _find_user_line(frames: Sequence[Any]) -> str:
    """Return the innermost line outside torch and overlap, such as "train.py:41 in main"; "" without frames.

    The first frame is the innermost one. Its line is taken if all are of torch and overlap.
    """
    frames = frames[:_MOST_FRAMES]
    found = next((frame for frame in frames if _is_of_user(frame["filename"])), frames[0] if frames else None)
    if not found or not found["filename"]:
        return ""
    name = re.split(r"[/\\]", _bounded_text(found["filename"]))[-1]
    return f"{name}:{int(found['line'])} in {_bounded_text(found['name'])}"[:_MOST_TEXT]


@lru_cache(maxsize=1 << 12)
def _is_of_user(filename: Any) -> bool:
    return not _NOT_OF_THE_USER.search(_bounded_text(filename))


# -- views for the judge -------------------------------------------------------------------------------------------


def ranks_without_dump(dumps: Mapping[int, Dump]) -> list[int]:
    """Return the ranks of the run without a dump, ascending.

    The ranks of a run are 0 to the highest rank with a dump, and all members of the groups that dumps list.
    """
    known = {rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks}
    return sorted((known | set(range(max(dumps) + 1))) - set(dumps))


def views_of_dumps(dumps: Mapping[int, Dump]) -> list[RankView]:
    """Return the views of the ranks of one run.

    Args:
        dumps: Dumps by rank, at least one; ranks without a dump get no view.
    """
    everyone = tuple(sorted({*dumps, *ranks_without_dump(dumps)}))
    is_gloo = any(dump.is_gloo for dump in dumps.values())
    ends = {rank: _renumber_ends(dump.ends, everyone) for rank, dump in dumps.items()}
    newest: dict[str, dict[int, int]] = {}  # number of the last collective, by group and rank
    for rank, of_rank in ends.items():
        for end in of_rank:
            numbers = newest.setdefault(end.call.key, {})
            numbers[rank] = max(end.seq, numbers.get(rank, -1))
    return [
        RankView(
            rank=rank,
            # Only the last operation may be one that failed and was recorded as done.
            ends=(*of_rank[:-1], *(_mark_failed_alone(end, newest[end.call.key], dumps) for end in of_rank[-1:])),
            unrecorded="sends and receives of gloo" if is_gloo else "",
        )
        for rank, of_rank in ends.items()
    ]


def _mark_failed_alone(end: End, newest: Mapping[int, int], dumps: Mapping[int, Dump]) -> End:
    """Return `end`; as FAILED if it is a collective recorded as done that another member has not called yet.

    Members without a dump do not count: they may have called. `newest` has the last collective of each rank in the
    group.
    """
    members = [rank for rank in end.call.members or newest if rank in dumps]
    alone = end.state is EndState.DONE and any(newest.get(rank, -1) < end.seq for rank in members)
    return structs.replace(end, state=EndState.FAILED) if alone and not end.call.is_message else end


def _renumber_ends(recorded: Sequence[End], everyone: tuple[int, ...]) -> list[End]:
    """Return the operations of a rank with keys and numbers that are the same on all ranks of an operation.

    Coalesced collectives share a number in the dump: each gets a key of its own, by its position among them. Messages
    are numbered here: the k-th unfinished send from rank 0 to rank 1 meets the k-th unfinished receive. `everyone` is
    the default group where the dump lists none.
    """
    counts: Counter[object] = Counter()
    calls: dict[CallRecord, CallRecord] = {}  # equal calls share one object
    ends = []
    for end in sorted(recorded, key=lambda end: end.issued_ns):
        call, members, seq = end.call, end.call.members, end.seq
        if call.is_message:
            # Ended messages are counted separately, as one of the two dumps may have lost some of them.
            key = f"{call.key} {members}{'' if end.is_open else ' ended'}"
            counts[key, call.op] += 1
            seq = counts[key, call.op]
        else:
            if not members and (call.key == "0" or call.group == "default_pg"):
                members = everyone
            key = f"{call.key} {format_rank_list(members)}"
            counts[key, seq] += 1
            key += f" {counts[key, seq]}"
        call = structs.replace(call, key=key, members=members)
        ends.append(structs.replace(end, call=calls.setdefault(call, call), seq=seq))
    return ends
