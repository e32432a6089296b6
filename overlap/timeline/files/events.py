"""A timeline as Chrome trace events, laid out so that Perfetto and chrome://tracing show all of it.

pid is the rank. tid 1 is compute, then come the communication streams, the program where it kept the event loop busy,
the steps, the calls that issued something, and where the program waited for it. Arrows lead from a call to what it
issued, and from there to who waits for it.
Viewers drop events that cross on one tid, and operations of one stream do cross (a stream works on a window), so those
move to further tids, named "comm (2)" and so on. Arguments of collectives have Kineto's names, so that other tools find
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import TypeAlias

from ..ranklist import group_listed
from ..span import CollectiveInfo, Span, span_order

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Event: TypeAlias = dict[str, Json]

ISSUE_NS = 1
"""Length given to the slice that an arrow starts from; an arrow without a slice under it is not drawn."""

_SAME_SIZE = frozenset({"all_reduce", "all_to_all", "broadcast", "reduce", "permute"})
"""Operations with as many elements going in as coming out."""


def to_events(ranks: Iterable[Sequence[Span]]) -> Iterator[list[Event]]:
    """Yield the events of each rank, in an order that depends on nothing but its spans.

    Args:
        ranks: The spans of each rank, in their order; what is empty is left out.
    """
    arrows = count(1)
    for spans in filter(None, ranks):
        events = list(_rank_events(spans[0].rank, spans))
        _number(events, arrows)
        yield events


def colour(spans: Iterable[Span]) -> list[list[Span]]:
    """Deal spans onto as few rows as possible so that none crosses another in its row. First fit by start."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=span_order):
        free = next((row for row in rows if row[-1].end_ns <= span.start_ns), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _rank_events(rank: int, spans: Sequence[Span]) -> Iterator[Event]:
    yield _meta(rank, "process_name", name=f"rank {rank}")
    yield _meta(rank, "process_sort_index", sort_index=rank)
    rows = _rows(spans)
    issues = len(rows) + 1
    waits = {id(span): tid for tid, row in enumerate(_waits(spans), issues + 1) for span in row}
    for tid, (title, row) in enumerate(rows, 1):
        yield from _thread(rank, tid, title, place=tid + 1)
        for span in row:
            yield _slice(span, tid)
            if span.info and span.info.issued_ns <= span.start_ns:
                yield from _arrow(span, span.info, issues, tid, waits.get(id(span)))
    if issued := sorted({span.info.issued_ns for span in spans if span.info}):
        yield from _thread(rank, issues, "issue", place=1)
        for at_ns in issued:
            yield _event(rank, issues, "X", at_ns, name="issue", cat="issue", dur=ISSUE_NS / 1000)
    for tid in sorted(set(waits.values())):
        yield from _thread(rank, tid, "wait" if tid == issues + 1 else f"wait ({tid - issues})", place=tid + 1)
    for span in spans:
        if span.info and span.info.awaited_ns is not None and id(span) in waits:
            dur = (span.end_ns - span.info.awaited_ns) / 1000
            yield _event(rank, waits[id(span)], "X", span.info.awaited_ns, name=span.name, cat="issue", dur=dur)
    yield from _in_flight(rank, spans)


def _in_flight(rank: int, spans: Sequence[Span]) -> Iterator[Event]:
    """Count the bytes of the operations that move, whenever that changes."""
    changes: dict[int, int] = {}
    for span in spans:
        if span.info and span.info.nbytes and span.info.met_ns < span.end_ns:
            for at_ns, nbytes in ((span.info.met_ns, span.info.nbytes), (span.end_ns, -span.info.nbytes)):
                changes[at_ns] = changes.get(at_ns, 0) + nbytes
    total = 0
    for at_ns in sorted(changes):
        if changes[at_ns]:
            total += changes[at_ns]
            yield _event(rank, 0, "C", at_ns, name="bytes in flight", args={"bytes": total})


def _rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Name and spans of each tid from 1 on: compute, communication streams, steps."""
    lanes: dict[tuple[int, str, str], list[Span]] = {(0, "compute", "compute"): []}
    order = {"compute": 0, "comm": 1, "program": 2, "wires": 3, "step": 4}
    for span in spans:
        lanes.setdefault((order[span.kind], span.kind, span.lane), []).append(span)
    rows: list[tuple[str, list[Span]]] = []
    for (_, kind, lane), members in sorted(lanes.items()):
        for number, row in enumerate(colour(members) or [[]], 1):
            title = "steps" if kind == "step" else lane
            rows.append((title if number == 1 else f"{title} ({number})", row))
    return rows


def _thread(rank: int, tid: int, title: str, *, place: int) -> Iterator[Event]:
    yield _meta(rank, "thread_name", tid, name=title)
    yield _meta(rank, "thread_sort_index", tid, sort_index=place)


def _meta(rank: int, what: str, tid: int = 0, **args: Json) -> Event:
    return {"ph": "M", "pid": rank, "tid": tid, "name": what, "args": args}


def _event(rank: int, tid: int, phase: str, at_ns: int, **fields: Json) -> Event:
    return {"ph": phase, "pid": rank, "tid": tid, "ts": at_ns / 1000, **fields}


def _slice(span: Span, tid: int) -> Event:
    # Microseconds as a float round off above 2**53 ns (104 days): the integers are the truth, `ts` is for viewers.
    args: dict[str, Json] = {"lane": span.lane, "start_ns": span.start_ns, "end_ns": span.end_ns}
    if span.step is not None:
        args["step"] = span.step
    if span.info:
        args |= _collective_args(span.info)
    if span.call_site:
        args["call_site"] = span.call_site
    if span.issued_ns is not None:
        args["issued_ns"] = span.issued_ns
    dur = span.duration_ns / 1000
    return _event(span.rank, tid, "X", span.start_ns, dur=dur, name=span.name, cat=span.kind, args=args)


def _waits(spans: Sequence[Span]) -> list[list[Span]]:
    """Deal the operations that the program waited for onto rows on which those waits do not cross."""
    waited = [(s.info.awaited_ns, s) for s in spans if s.info and s.info.awaited_ns is not None]
    rows: list[list[Span]] = []
    for awaited_ns, span in sorted((each for each in waited if each[0] < each[1].end_ns), key=lambda each: each[0]):
        free = next((row for row in rows if row[-1].end_ns <= awaited_ns), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _arrow(span: Span, info: CollectiveInfo, issues: int, tid: int, waits: int | None) -> Iterator[Event]:
    fields: dict[str, Json] = {"name": "issued", "cat": "issue"}
    yield _event(span.rank, issues, "s", info.issued_ns, **fields)
    if waits is None or info.awaited_ns is None:
        yield _event(span.rank, tid, "f", span.start_ns, **fields, bp="e")
    else:
        yield _event(span.rank, tid, "t", span.start_ns, **fields, bp="e")
        yield _event(span.rank, waits, "f", max(info.awaited_ns, span.start_ns), **fields, bp="e")


def _collective_args(info: CollectiveInfo) -> dict[str, Json]:
    args: dict[str, Json] = {
        "Collective name": info.op,
        "Process Group Name": info.group,
        "dtype": info.dtype,
        "algorithm": info.algorithm,
        "seq": info.seq,
        "nbytes": info.nbytes,
        "issued_ns": info.issued_ns,
        "met_ns": info.met_ns,
        "priority": info.priority,
        "call_site": info.call_site,
        "queue_wait_ns": info.queue_wait_ns,
        "last_rank_wait_ns": info.last_rank_wait_ns,
        "transfer_ns": info.transfer_ns,
    }
    if info.awaited_ns is not None:
        args["awaited_ns"] = info.awaited_ns
    if info.ranks:
        args |= {"Process Group Ranks": group_listed(info.ranks), "Group size": len(info.ranks)}
    if info.op in _SAME_SIZE and (itemsize := _itemsize_bytes(info.dtype)):
        args["In msg nelems"] = args["Out msg nelems"] = info.nbytes // itemsize
    return args


@cache
def _itemsize_bytes(dtype: str) -> int:
    """Read it off the name: float32 and bfloat16 end in their bits, float8_e4m3fn begins its suffix after them."""
    if dtype == "bool":
        return 1
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) // 8 if digits else 0


def _number(events: list[Event], arrows: Iterator[int]) -> None:
    """Give all ends of each arrow one id; they follow each other."""
    for event in events:
        if event["ph"] == "s":
            number = next(arrows)
        if event["ph"] in ("s", "t", "f"):
            event["id"] = number
