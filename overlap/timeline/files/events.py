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

from ..columnar import INT32_COLUMNS, INT64_COLUMNS, KINDS, NONE, ROLES, SpanColumns, SpanGroup
from ..ranklist import listed

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Event: TypeAlias = dict[str, Json]

_ISSUE_US = 0.001
"""Length given to the slice that an arrow starts from; an arrow without a slice under it is not drawn."""

_SAME_SIZE = frozenset({"all_reduce", "all_to_all", "broadcast", "reduce", "permute"})
"""Operations with as many elements going in as coming out."""

_KIND_ORDER = {"compute": 0, "comm": 1, "program": 2, "wires": 3, "step": 4}  # of kinds, by tid

_Row: TypeAlias = tuple[int, ...]
"""The numbers of one span, in the order of `INT64_COLUMNS` and `INT32_COLUMNS`."""

_START, _END, _ISSUED, _MET, _NBYTES, _AWAITED, _KIND, _LANE, _NAME, _OP = (
    (*INT64_COLUMNS, *INT32_COLUMNS).index(name)
    for name in ("start_ns", "end_ns", "issued_ns", "met_ns", "nbytes", "awaited_ns", "kind", "lane", "name", "op")
)


def rank_events(columns: SpanColumns, arrows: Iterator[int]) -> Iterator[str]:
    """Yield the events of one rank as JSON, in an order that depends on nothing but its spans.

    Args:
        columns: The spans of the rank, in the order of a timeline; at least one.
        arrows: Numbers for arrows, unique in the file.
    """
    rank = int(columns.rank[0])
    spans = list(zip(*(getattr(columns, name).tolist() for name in (*INT64_COLUMNS, *INT32_COLUMNS)), strict=True))
    texts = [*map(cached_json, columns.texts)]
    yield f'{{"args":{{"name":"rank {rank}"}},"name":"process_name","ph":"M","pid":{rank},"tid":0}}'
    yield f'{{"args":{{"sort_index":{rank}}},"name":"process_sort_index","ph":"M","pid":{rank},"tid":0}}'
    threads = _threads(columns, spans)

    @cache  # by number: to hash a thousand ranks for each span is slow
    def group_fields(number: int) -> tuple[str, str]:
        return _group_fields(columns.groups[number])

    issues = len(threads) + 1
    waits = _wait_tids(spans, issues + 1)
    for tid, (title, members) in enumerate(threads, 1):
        yield from _thread_names(rank, tid, title, place=tid + 1)
        for number in members:
            span = spans[number]
            yield _span_slice(span, rank, tid, texts, columns, group_fields)
            if span[_OP] >= 0 and span[_ISSUED] <= span[_START]:
                yield from _arrow_events(span, rank, next(arrows), (issues, tid, waits.get(number)))
    if issued := sorted({span[_ISSUED] for span in spans if span[_OP] >= 0}):
        yield from _thread_names(rank, issues, "issue", place=1)
        for at_ns in issued:
            yield _plain_slice("issue", at_ns, _ISSUE_US, rank, issues, name='"issue"')
    for tid in sorted(set(waits.values())):
        yield from _thread_names(rank, tid, "wait" if tid == issues + 1 else f"wait ({tid - issues})", place=tid + 1)
    for number, tid in sorted(waits.items()):
        span = spans[number]
        length_us = (span[_END] - span[_AWAITED]) / 1000
        yield _plain_slice("issue", span[_AWAITED], length_us, rank, tid, name=texts[span[_NAME]])
    yield from _bytes_in_flight(rank, spans)


def assign_rows(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return a row number for each interval: as few rows as possible, and no two intervals of a row overlap.

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
    """Return the title and the indices of the spans of each tid from 1 on: compute, streams, program, wires, steps."""
    lanes: dict[tuple[int, str, str], list[int]] = {(0, "compute", "compute"): []}
    for number, span in enumerate(spans):
        kind = KINDS[span[_KIND]]
        lanes.setdefault((_KIND_ORDER[kind], kind, columns.texts[span[_LANE]]), []).append(number)
    threads: list[tuple[str, list[int]]] = []
    for (_, kind_name, lane), members in sorted(lanes.items()):
        row_numbers = assign_rows((spans[number][_START], spans[number][_END]) for number in members)
        title = "steps" if kind_name == "step" else lane
        for row in range(max(row_numbers, default=0) + 1):
            in_row = [number for number, at in zip(members, row_numbers, strict=True) if at == row]
            threads.append((title if row == 0 else f"{title} ({row + 1})", in_row))
    return threads


def _wait_tids(spans: Sequence[_Row], first: int) -> dict[int, int]:
    """Return, by index of an awaited operation's span, the tid from `first` on that shows the program's wait."""
    waited = [
        (span[_AWAITED], number)
        for number, span in enumerate(spans)
        if span[_OP] >= 0 and span[_AWAITED] != NONE and span[_AWAITED] < span[_END]
    ]
    waited.sort()
    row_numbers = assign_rows((awaited_ns, spans[number][_END]) for awaited_ns, number in waited)
    return {number: first + row for (_, number), row in zip(waited, row_numbers, strict=True)}


def _thread_names(rank: int, tid: int, title: str, *, place: int) -> Iterator[str]:
    """Yield the metadata events that give a tid its title and its place among the tids of the rank."""
    end = f'"ph":"M","pid":{rank},"tid":{tid}}}'
    yield f'{{"args":{{"name":{cached_json(title)}}},"name":"thread_name",{end}'
    yield f'{{"args":{{"sort_index":{place}}},"name":"thread_sort_index",{end}'


def _span_slice(
    span: _Row,
    rank: int,
    tid: int,
    texts: Sequence[str],
    columns: SpanColumns,
    group_fields: Callable[[int], tuple[str, str]],
) -> str:
    """Return the event of one span as JSON: its interval on a tid, and all its fields as integers and texts."""
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
        size, ranks = group_fields(group)
        tag = columns.groups[group].tag
        tagged = f',"tag":{tag}' if tag else ""
        awaited = "" if awaited_ns == NONE else f'"awaited_ns":{awaited_ns},'
        elements = _element_counts(columns.texts[op], columns.texts[dtype], nbytes)
        args = (
            f'"Collective name":{texts[op]},{size}{elements}{ranks}'
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
def _group_fields(group: SpanGroup) -> tuple[str, str]:
    """Return the JSON fields of a group's size and of its name and ranks, each with a comma at its end."""
    name, ranks, _ = group
    size = f'"Group size":{len(ranks)},' if ranks else ""
    within = f'"Process Group Ranks":"{listed(ranks)}",' if ranks else ""
    return size, f'"Process Group Name":{cached_json(name)},{within}'


def _element_counts(op: str, dtype: str, nbytes: int) -> str:
    """Return the JSON fields of the elements sent and received; "" where the two differ or the dtype is unknown."""
    if op not in _SAME_SIZE or not (itemsize := _itemsize_bytes(dtype)):
        return ""
    return f'"In msg nelems":{nbytes // itemsize},"Out msg nelems":{nbytes // itemsize},'


@cache
def _itemsize_bytes(dtype: str) -> int:
    """Return the bytes of an element by the dtype's name, in which the bits follow the letters; 0 if none do."""
    if dtype == "bool":
        return 1
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) // 8 if digits else 0


def _arrow_events(span: _Row, rank: int, number: int, tids: tuple[int, int, int | None]) -> Iterator[str]:
    """Yield the ends of an arrow from the call over the operation to the wait; all have one number."""
    issues, tid, waits = tids
    begin = f'"cat":"issue","id":{number},"name":"issued","ph":'
    yield f'{{{begin}"s","pid":{rank},"tid":{issues},"ts":{span[_ISSUED] / 1000}}}'
    phase = "f" if waits is None else "t"
    yield f'{{"bp":"e",{begin}"{phase}","pid":{rank},"tid":{tid},"ts":{span[_START] / 1000}}}'
    if waits is not None:
        at_us = max(span[_AWAITED], span[_START]) / 1000
        yield f'{{"bp":"e",{begin}"f","pid":{rank},"tid":{waits},"ts":{at_us}}}'


def _bytes_in_flight(rank: int, spans: Sequence[_Row]) -> Iterator[str]:
    """Yield counter events: the sum of the bytes of all operations that move, at each instant at which it changes."""
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


_json_encoder = msgspec.json.Encoder(order="sorted")


def dump_json(value: Json) -> str:
    """Return JSON with sorted keys and no blanks; lone surrogates, which UTF-8 cannot encode, become escapes."""
    try:
        return _json_encoder.encode(value).decode()
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=10_000)
def cached_json(text: str) -> str:
    """Return a text as a JSON string, from a cache: the events of a file repeat few texts."""
    return dump_json(text)
