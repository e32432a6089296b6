"""Tapes of recorded runs: the operations of each rank, their order, and the operations each one awaits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, TypeAlias

from ...collectives.kinds import Collective
from ...cost.parameters import itemsize_bytes
from ...errors import UsageError
from ...timeline.columnar import Table
from ...timeline.measure.meetings import PAIRED
from ...timeline.measure.metrics import median_step
from ...timeline.replay.graph import Node
from ...timeline.replay.inference import graph_of
from ...timeline.span import CollectiveInfo, Span
from ...timeline.spans import CUT, ORIGIN, Timeline
from ...timeline.why.verdict import verdict_of

MoveKind: TypeAlias = Literal["compute", "collective", "message", "kept", "begin", "end"]

UNTYPED = "float32"
"""Dtype that is assumed where a trace records none."""

ITSELF = -1
"""Stands for the index of a move: the move's own issue."""

_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "c10::half": "float16", "c10::bfloat16": "bfloat16",
    "int": "int32", "long": "int64", "long int": "int64", "byte": "uint8", "unsigned char": "uint8", "char": "int8",
}  # fmt: skip
_KNOWN_COLLECTIVES = frozenset(each.text for each in Collective) - PAIRED
_ROOTED_COLLECTIVES = frozenset(each.text for each in Collective if each.traits.rooted)


@dataclass(frozen=True, slots=True)
class Dependency:
    """A move that has to be over before another one begins, and a delay between them."""

    move: int  # Index of the earlier move on the same rank, or `ITSELF`
    delay_ns: int  # Recorded time that no span explains


@dataclass(slots=True, kw_only=True)
class Move:
    """One compute, operation or step border that a rank issues."""

    # "message" is one end of a message; "kept" is communication of unknown size or partners, which keeps its recorded
    # time; "begin" and "end" are those of a step.
    kind: MoveKind
    span: Span  # The recorded span
    lane: str = ""  # The stream on which it is issued
    dtype: str = ""  # Dtype of the communication
    tag: int = 0  # Tag of the message
    pause_ns: int = 0  # Time of the program before it issues this, that no span explains
    awaits: tuple[Dependency, ...] = ()  # The moves that the program awaits before it issues this
    needs: tuple[Dependency, ...] = ()  # The moves that this waits for itself

    @property
    def info(self) -> CollectiveInfo:
        """Details of communication."""
        assert self.span.info is not None
        return self.span.info


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """A recorded run as the moves of its ranks."""

    world_size: int
    moves: Mapping[int, Sequence[Move]]  # Moves of each recorded rank, in their order of issue
    cluster: str | None  # The recorded one, if the trace names it
    clock: str
    steps: int  # Number of steps
    step_ns: int  # Wall time of the median step, or of the whole run
    notes: Sequence[str] = field(default=())  # Facts that the trace lacks, and the assumptions instead


def infer_tape(timeline: Timeline) -> Tape:
    """Infer the operations of each rank and their dependencies from a timeline, as `replay.inference` describes.

    Raises:
        UsageError: If it is empty.
    """
    if not any(span.kind in ("compute", "comm") for span in timeline.spans):
        raise UsageError("a trace with neither compute nor communication is no program; record a run with --trace")
    notes: Counter[str] = Counter()
    maker = _MoveMaker(timeline, notes)
    moves = _rank_moves(timeline, maker)
    if timeline.dropped:
        notes["spans of its beginning were not recorded"] += timeline.dropped
    if CUT in timeline.meta:
        notes["file or more was cut off: what is complete of it is taken"] += 1
    return Tape(
        world_size=timeline.world_size,
        moves=moves,
        cluster=timeline.meta.get("cluster"),
        clock=timeline.clock,
        steps=len(timeline.steps()),
        step_ns=verdict_of(timeline, step=median_step(timeline)).wall_ns,
        notes=[f"{count} {text}" for text, count in notes.items()],
    )


class _MoveMaker:
    """Makes moves of spans: finds the kind, dtype and tag of communication.

    Args:
        timeline: The recorded run.
        notes: Counts of facts that the trace does not record.
    """

    def __init__(self, timeline: Timeline, notes: Counter[str]) -> None:
        self._notes = notes
        comm = [span for span in timeline.spans if span.kind == "comm"]
        self._ours = ORIGIN not in timeline.meta
        self._message_tags = _message_tags(comm)
        self._recorded_by_all = _recorded_by_all(comm, timeline.ranks())

    def make_move(self, span: Span) -> Move | None:
        """Return the move of a span; None if not all ranks of its group recorded the collective."""
        info = span.info
        if span.kind == "compute":
            return Move(kind="compute", span=span)
        if info is None or (info.op not in _KNOWN_COLLECTIVES and id(span) not in self._message_tags):
            return self._timed_move(
                span, "operations of an unknown kind or with unknown partners keep their recorded time"
            )
        if not info.nbytes and info.op != Collective.BARRIER.text:
            return self._timed_move(span, "operations of unknown size keep their recorded time")
        if id(span) in self._message_tags:
            lane = self._lane(span, info)
            return Move(
                kind="message", span=span, lane=lane, dtype=self._element_type(info), tag=self._message_tags[id(span)]
            )
        if not self._recorded_by_all[_meeting_key(info)]:
            self._notes["operations are left out: not all ranks of their groups recorded them"] += 1
            return None
        if info.op in _ROOTED_COLLECTIVES:
            self._notes["rooted operations: the first rank of the group is taken for the root"] += 1
        if info.op == Collective.PERMUTE.text:
            self._notes["permutations: each rank is taken to send to the next one"] += 1
        return Move(kind="collective", span=span, lane=self._lane(span, info), dtype=self._element_type(info))

    def _lane(self, span: Span, info: CollectiveInfo) -> str:
        """Return the stream of a span; of foreign traces its kind, as they record no order across kinds."""
        return span.lane if self._ours else info.op

    def message_tag(self, span: Span) -> int | None:
        """Return the tag of a message; None for any other span."""
        return self._message_tags.get(id(span))

    def _timed_move(self, span: Span, why: str) -> Move:
        """Return a move that keeps the recorded time of a span, and count the reason as a note."""
        self._notes[why] += 1
        return Move(kind="kept", span=span)

    def _element_type(self, info: CollectiveInfo) -> str:
        """Return the numpy name of the recorded dtype; `UNTYPED`, with a note, where it is unknown."""
        name = _DTYPES.get(info.dtype.lower(), info.dtype.lower())
        try:
            itemsize_bytes(name or "unknown")
        except UsageError:
            if info.op != Collective.BARRIER.text:
                self._notes[f"operations of unknown type are taken to be {UNTYPED}"] += 1
            return UNTYPED
        return name


def _meeting_key(info: CollectiveInfo) -> tuple[object, ...]:
    """Return the key that the spans of one collective have in common."""
    return info.group, info.ranks, info.op, info.seq


def _recorded_by_all(comm: Iterable[Span], recorded: Sequence[int]) -> dict[tuple[object, ...], bool]:
    """Return by collective whether all recorded ranks of its group have a span of it."""
    met: dict[tuple[object, ...], set[int]] = {}
    for span in comm:
        if span.info is not None:
            met.setdefault(_meeting_key(span.info), set()).add(span.rank)
    traced = set(recorded)
    return {key: ranks >= traced.intersection(key[1]) for key, ranks in met.items()}  # type: ignore[arg-type]


def _message_tags(comm: Iterable[Span]) -> dict[int, int]:
    """Return new tags by the identity of a message's span, equal at both ends; spans without the other end have none.

    Tags are new ones. Our own traces number the messages of each tag, several times from 0; each message of another
    tool gets its own tag.
    """
    ends: dict[tuple[tuple[int, ...], int, bool], list[Span]] = {}
    for span in comm:
        info = span.info
        if info is not None and info.op in PAIRED and len(info.ranks) == 2 and span.rank in info.ranks:
            ends.setdefault((info.ranks, info.tag, span.rank == info.ranks[0]), []).append(span)
    tags: dict[int, int] = {}
    new_tags = Table[tuple[int, int]]()  # recorded tag, and the number of the count
    for (ranks, recorded, sends), spans in ends.items():
        others = len(ends.get((ranks, recorded, not sends), ()))
        spans.sort(key=_message_order)
        counts: list[int] = []  # of the messages with each tag, which are numbered from 0
        for span in spans[:others]:
            number = span.info.seq if span.info and span.info.op == Collective.P2P.text else 0
            tag = next((tag for tag, count in enumerate(counts) if count == number), len(counts))
            counts[tag : tag + 1] = [number + 1]
            tags[id(span)] = new_tags[recorded, tag]
    return tags


def _message_order(span: Span) -> tuple[int, int, int]:
    """Return the sort key of a message: when both ends met, or the start in a trace of another tool."""
    assert span.info is not None
    at_ns = span.info.met_ns if span.info.op == Collective.P2P.text else span.start_ns
    return at_ns, span.info.seq, span.info.nbytes


def _rank_moves(timeline: Timeline, maker: _MoveMaker) -> dict[int, list[Move]]:
    """Return the moves of each rank: the nodes of a replay in the order of its program."""
    graph = graph_of(timeline)
    program: dict[int, list[Node]] = {}
    works: dict[Node, Node] = {}  # by the instants of programs that issue them
    arrivals: dict[int, Node] = {}
    for node in graph.nodes:
        if node.kind == "program":
            program.setdefault(node.ranks[0], []).append(node)
        elif node.kind in ("compute", "arrival"):
            works[node.after[0][0]] = node
            arrivals[id(node.span)] = node
    over = {node: arrivals[id(node.span)] for node in graph.nodes if node.kind == "end"}
    marks: dict[Node, Move] = {}
    for begin, end, span in graph.steps:
        marks[begin], marks[end] = Move(kind="begin", span=span), Move(kind="end", span=span)
    return {rank: _RankMoves(works, over, marks, maker).moves(nodes) for rank, nodes in program.items()}


class _RankMoves:
    """Makes the moves of one rank.

    Args:
        works: Computes and arrivals of communication, by the instant that issues them.
        over: Arrivals of communication by its end.
        marks: Begins and ends of steps by their instant.
        maker: Makes a move of a span.
    """

    def __init__(
        self, works: Mapping[Node, Node], over: Mapping[Node, Node], marks: Mapping[Node, Move], maker: _MoveMaker
    ) -> None:
        self._works, self._over, self._marks, self._maker = works, over, marks, maker
        self._moves: list[Move] = []
        self._move_indices: dict[Node, int] = {}
        self._before: dict[tuple[object, ...], Node] = {}  # on the same stream of a group

    def moves(self, nodes: Sequence[Node]) -> list[Move]:
        """Return the moves of the nodes of a program, in order."""
        for _, instant in groupby(nodes, self._issued_ns):
            self._add_instant(list(instant))
        return self._moves

    def _issued_ns(self, node: Node) -> int:
        """Return the instant at which the program issued a node."""
        if node in self._marks:
            span = self._marks[node].span
            return span.start_ns if self._marks[node].kind == "begin" else span.end_ns
        return self._works[node].span.called_ns

    def _add_instant(self, nodes: Sequence[Node]) -> None:
        """Append the moves of one instant, each after the moves that it needs: a trace does not record their order."""
        first = len(self._moves)
        awaited = self._dependencies(work for node in nodes for work in (*node.after, *((n, 0.0) for n in node.likely)))
        waiting = {self._works[node]: node for node in nodes if node in self._works}
        before: dict[Node, Node] = {}
        last: dict[tuple[object, ...], Node] = {}
        for work in sorted((work for work in waiting if work.kind == "arrival"), key=_sequence_number):
            info = work.span.info
            if info is not None:
                key = info.group, info.ranks, work.span.lane, self._maker.message_tag(work.span)
                if key in last:
                    before[work] = last[key]
                last[key] = work

        def add_after_needs(work: Node) -> None:
            """Append the move of `work` after those of this instant that it needs; a cycle ends in any order."""
            pending = [work]
            while pending:
                top = pending[-1]
                needed = [self._over.get(need, need) for need, _ in top.after]
                needed += [before[top]] if top in before else []
                missing = [need for need in needed if need in waiting and need is not top]
                if missing and len(pending) <= len(nodes):
                    pending.append(missing[0])
                    continue
                pending.pop()
                if waiting.pop(top, None) is not None:
                    self._moves.append(self._work_move(top))

        for node in nodes:
            if node in self._marks:
                self._moves.append(self._marks[node])
            elif self._works[node] in waiting:
                add_after_needs(self._works[node])
        move = self._moves[first]
        move.awaits = awaited
        move.pause_ns = round(nodes[0].work_ns + sum(delay for work, delay in nodes[0].after if work.kind == "program"))

    def _work_move(self, work: Node) -> Move:
        """Return the move of a compute or an arrival, with the moves that it waits for, and note its index."""
        span = work.span
        move = self._maker.make_move(span) or Move(kind="kept", span=replace(span, end_ns=span.start_ns))
        move.needs = self._dependencies([*work.after, *((each, 0.0) for each in work.likely)], issued=work.after[0][0])
        self._move_indices[work] = len(self._moves)
        return move

    def _dependencies(self, nodes: Iterable[tuple[Node, float]], issued: Node | None = None) -> tuple[Dependency, ...]:
        """Return the moves of nodes, with their delays; `issued` stands for the move's own issue."""
        dependencies = []
        for node, delay_ns in nodes:
            place = ITSELF if node is issued else self._move_indices.get(self._over.get(node, node))
            if place is not None and (place != ITSELF or delay_ns):
                dependencies.append(Dependency(place, round(delay_ns)))
        return tuple(dict.fromkeys(dependencies))


def _sequence_number(node: Node) -> int:
    """Return the sequence number of an operation in its group; -1 without details."""
    info = node.span.info
    return -1 if info is None else info.seq
