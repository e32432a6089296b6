"""Chrome trace events of a timeline, laid out so that Perfetto and chrome://tracing show all of it.

pid is the rank. tid 1 is compute, then come the communication streams, the program where it kept the event loop busy,
the steps, the calls that issued something, and where the program waited for it. Arrows lead from a call to what it
issued, and from there to the wait for it.
Viewers drop events that cross on one tid, and operations of one stream do cross (a stream works on a window), so those
move to further tids, named "comm (2)" and so on. Arguments of collectives have Kineto's names, so that other tools find
them. The fields of an event are in alphabetical order, so that equal timelines give equal bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

import msgspec

from ..columnar import INDEXES, KINDS, NONE, ROLES, WHOLES, SpanColumns, SpanGroup
from ..ranklist import listed

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Event: TypeAlias = dict[str, Json]

_ISSUE_US = 0.001
"""Length given to the slice that an arrow starts from; an arrow without a slice under it is not drawn."""

_SAME_SIZE = frozenset({"all_reduce", "all_to_all", "broadcast", "reduce", "permute"})
"""Operations with as many elements going in as coming out."""

_ORDER = {"compute": 0, "comm": 1, "program": 2, "wires": 3, "step": 4}  # of kinds, by tid

_Row: TypeAlias = tuple[int, ...]
"""The numbers of one span, in the order of `WHOLES` and `INDEXES`."""

_START, _END, _ISSUED, _MET, _NBYTES, _AWAITED, _KIND, _LANE, _NAME, _OP = (
    (*WHOLES, *INDEXES).index(name)
    for name in ("start_ns", "end_ns", "issued_ns", "met_ns", "nbytes", "awaited_ns", "kind", "lane", "name", "op")
)


def rank_events(columns: SpanColumns, arrows: Iterator[int]) -> Iterator[str]:
    """Yield the events of one rank as JSON, in an order that depends on nothing but its spans.

    Args:
        columns: The spans of the rank, in the order of a timeline; at least one.
        arrows: Numbers for arrows, unique in the file.
    """
    rank = int(columns.rank[0])
    spans = list(zip(*(getattr(columns, name).tolist() for name in (*WHOLES, *INDEXES)), strict=True))
    texts = [*map(json_of, columns.texts)]
    yield f'{{"args":{{"name":"rank {rank}"}},"name":"process_name","ph":"M","pid":{rank},"tid":0}}'
    yield f'{{"args":{{"sort_index":{rank}}},"name":"process_sort_index","ph":"M","pid":{rank},"tid":0}}'
    threads = _threads(columns, spans)

    @cache  # by number: to hash a thousand ranks for each span is slow
    def group_of(number: int) -> tuple[str, str]:
        return _group(columns.groups[number])

    issues = len(threads) + 1
    waits = _waits(spans, issues + 1)
    for tid, (title, members) in enumerate(threads, 1):
        yield from _thread(rank, tid, title, place=tid + 1)
        for number in members:
            span = spans[number]
            yield _slice(span, rank, tid, texts, columns, group_of)
            if span[_OP] >= 0 and span[_ISSUED] <= span[_START]:
                yield from _arrow(span, rank, next(arrows), (issues, tid, waits.get(number)))
    if issued := sorted({span[_ISSUED] for span in spans if span[_OP] >= 0}):
        yield from _thread(rank, issues, "issue", place=1)
        for at_ns in issued:
            yield _plain_slice("issue", at_ns, _ISSUE_US, rank, issues, name='"issue"')
    for tid in sorted(set(waits.values())):
        yield from _thread(rank, tid, "wait" if tid == issues + 1 else f"wait ({tid - issues})", place=tid + 1)
    for number, tid in sorted(waits.items()):
        span = spans[number]
        length_us = (span[_END] - span[_AWAITED]) / 1000
        yield _plain_slice("issue", span[_AWAITED], length_us, rank, tid, name=texts[span[_NAME]])
    yield from _in_flight(rank, spans)


def deal(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return a row for each interval, as few rows as possible, so that none crosses another in its row.

    The intervals, each with its start and end, are in order of start: the first row that is free takes the next one.
    """
    rows: list[int] = []
    free_ns: list[int] = []
    for start_ns, end_ns in spans:
        row = next((row for row, until_ns in enumerate(free_ns) if until_ns <= start_ns), len(free_ns))
        free_ns[row : row + 1] = [end_ns]
        rows.append(row)
    return rows


def _threads(columns: SpanColumns, spans: Sequence[_Row]) -> list[tuple[str, list[int]]]:
    """Return the title and the spans of each tid from 1 on: compute, communication streams, steps."""
    lanes: dict[tuple[int, str, str], list[int]] = {(0, "compute", "compute"): []}
    for number, span in enumerate(spans):
        of = KINDS[span[_KIND]]
        lanes.setdefault((_ORDER[of], of, columns.texts[span[_LANE]]), []).append(number)
    threads: list[tuple[str, list[int]]] = []
    for (_, kind, lane), members in sorted(lanes.items()):
        dealt = deal((spans[number][_START], spans[number][_END]) for number in members)
        title = "steps" if kind == "step" else lane
        for row in range(max(dealt, default=0) + 1):
            found = [number for number, its_row in zip(members, dealt, strict=True) if its_row == row]
            threads.append((title if row == 0 else f"{title} ({row + 1})", found))
    return threads


def _waits(spans: Sequence[_Row], first: int) -> dict[int, int]:
    """Return the tid, from `first` on, of the wait of the program for each operation that it waited for."""
    waited = [
        (span[_AWAITED], number)
        for number, span in enumerate(spans)
        if span[_OP] >= 0 and span[_AWAITED] != NONE and span[_AWAITED] < span[_END]
    ]
    waited.sort()
    dealt = deal((awaited_ns, spans[number][_END]) for awaited_ns, number in waited)
    return {number: first + row for (_, number), row in zip(waited, dealt, strict=True)}


def _thread(rank: int, tid: int, title: str, *, place: int) -> Iterator[str]:
    end = f'"ph":"M","pid":{rank},"tid":{tid}}}'
    yield f'{{"args":{{"name":{json_of(title)}}},"name":"thread_name",{end}'
    yield f'{{"args":{{"sort_index":{place}}},"name":"thread_sort_index",{end}'


def _slice(
    span: _Row,
    rank: int,
    tid: int,
    texts: Sequence[str],
    columns: SpanColumns,
    group_of: Callable[[int], tuple[str, str]],
) -> str:
    # Microseconds as a float round off above 2**53 ns (104 days): the integers are the truth, `ts` is for viewers.
    start_ns, end_ns, issued_ns, met_ns, seq, nbytes, priority, step, awaited_ns, *indexes = span
    kind, lane, name, op, algorithm, dtype, call_site, group, role = indexes
    for_what = f'"role":"{ROLES[role]}",' if role else ""
    in_step = "" if step == NONE else f',"step":{step}'
    if op < 0:
        place = f'"call_site":{texts[call_site]},' if columns.texts[call_site] else ""
        issued = "" if issued_ns == NONE else f',"issued_ns":{issued_ns}'
        args = f'{place}"end_ns":{end_ns}{issued},"lane":{texts[lane]},{for_what}"start_ns":{start_ns}{in_step}'
    else:
        size, ranks = group_of(group)
        tag = columns.groups[group].tag
        tagged = f',"tag":{tag}' if tag else ""
        awaited = "" if awaited_ns == NONE else f'"awaited_ns":{awaited_ns},'
        args = (
            f'"Collective name":{texts[op]},{size}{_elements(columns.texts[op], columns.texts[dtype], nbytes)}{ranks}'
            f'"algorithm":{texts[algorithm]},{awaited}"call_site":{texts[call_site]},"dtype":{texts[dtype]},'
            f'"end_ns":{end_ns},"issued_ns":{issued_ns},"lane":{texts[lane]},"last_rank_wait_ns":{met_ns - start_ns},'
            f'"met_ns":{met_ns},"nbytes":{nbytes},"priority":{priority},"queue_wait_ns":{start_ns - issued_ns},'
            f'{for_what}"seq":{seq},"start_ns":{start_ns}{in_step}{tagged},"transfer_ns":{end_ns - met_ns}'
        )
    length_us = (end_ns - start_ns) / 1000
    return f'{{"args":{{{args}}},{_plain_slice(KINDS[kind], start_ns, length_us, rank, tid, name=texts[name])[1:]}'


def _plain_slice(category: str, at_ns: int, length_us: float, rank: int, tid: int, *, name: str) -> str:
    return (
        f'{{"cat":"{category}","dur":{length_us},"name":{name},"ph":"X","pid":{rank},"tid":{tid},"ts":{at_ns / 1000}}}'
    )


@lru_cache(maxsize=1024)
def _group(group: SpanGroup) -> tuple[str, str]:
    """Return the size of a group, and its name and ranks."""
    name, ranks, _ = group
    size = f'"Group size":{len(ranks)},' if ranks else ""
    within = f'"Process Group Ranks":"{listed(ranks)}",' if ranks else ""
    return size, f'"Process Group Name":{json_of(name)},{within}'


def _elements(op: str, dtype: str, nbytes: int) -> str:
    if op not in _SAME_SIZE or not (itemsize := _itemsize_bytes(dtype)):
        return ""
    return f'"In msg nelems":{nbytes // itemsize},"Out msg nelems":{nbytes // itemsize},'


@cache
def _itemsize_bytes(dtype: str) -> int:
    """Read it off the name: float32 and bfloat16 end in their bits, float8_e4m3fn begins its suffix after them."""
    if dtype == "bool":
        return 1
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) // 8 if digits else 0


def _arrow(span: _Row, rank: int, number: int, tids: tuple[int, int, int | None]) -> Iterator[str]:
    """Yield the ends of an arrow from the call over the operation to the wait; all have one number."""
    issues, tid, waits = tids
    begin = f'"cat":"issue","id":{number},"name":"issued","ph":'
    yield f'{{{begin}"s","pid":{rank},"tid":{issues},"ts":{span[_ISSUED] / 1000}}}'
    phase = "f" if waits is None else "t"
    yield f'{{"bp":"e",{begin}"{phase}","pid":{rank},"tid":{tid},"ts":{span[_START] / 1000}}}'
    if waits is not None:
        at_us = max(span[_AWAITED], span[_START]) / 1000
        yield f'{{"bp":"e",{begin}"f","pid":{rank},"tid":{waits},"ts":{at_us}}}'


def _in_flight(rank: int, spans: Sequence[_Row]) -> Iterator[str]:
    """Count the bytes of the operations that move, whenever that changes."""
    changes: dict[int, int] = {}
    for span in spans:
        if span[_OP] >= 0 and span[_NBYTES] and span[_MET] < span[_END]:
            for at_ns, nbytes in ((span[_MET], span[_NBYTES]), (span[_END], -span[_NBYTES])):
                changes[at_ns] = changes.get(at_ns, 0) + nbytes
    total = 0
    for at_ns in sorted(changes):
        if changes[at_ns]:
            total += changes[at_ns]
            counter = f'"name":"bytes in flight","ph":"C","pid":{rank},"tid":0,"ts":{at_ns / 1000}'
            yield f'{{"args":{{"bytes":{total}}},{counter}}}'


_swift = msgspec.json.Encoder(order="sorted")


def dumps(value: Json) -> str:
    """Return JSON with sorted keys: with escapes where a text has halves of characters, which UTF-8 cannot say."""
    try:
        return _swift.encode(value).decode()
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=10_000)
def json_of(text: str) -> str:
    """Return a text as JSON; a file has few texts, many times."""
    return dumps(text)
