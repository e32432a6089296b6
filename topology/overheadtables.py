"""`[collectives]` of a machine file as tables, and as the records that they become."""

# Annotations are objects in this file: evaluating them from text takes msgspec longer than everything else here.

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from .grouprules import Confidence
from .keys import (
    Amount,
    AmountKey,
    Duration,
    DurationKey,
    Flag,
    NotNegative,
    Share,
    Text,
    Texts,
    TomlTable,
    figure,
    figure_or_none,
    wrong,
)
from .overheads import Collectives, Curve, Figure, Library, Overheads, Program, WireOverheads

Point = Annotated[tuple[NotNegative, Share], Meta(description="a pair of bytes and a share, such as [65536, 0.5]")]


class ShareTable(TomlTable):
    """A share with its origin: of any message, or by its size."""

    value: Share | None = None
    points: Annotated[tuple[Point, ...], Meta(description="a list of pairs such as [[65536, 0.5], [1e8, 0.9]]")] = ()
    source: Text = ""
    confidence: Confidence = "E"

    def __post_init__(self) -> None:
        if (self.value is None) == (not self.points):
            raise ValueError("value: expected a share, or points = [[bytes, share], ...], one of the two")
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            raise wrong("points", "ascending numbers of bytes", tuple(sizes))


ShareKey = Annotated[
    Share | ShareTable,
    Meta(description="a share, more than 0 and at most 1, or { value, source, confidence }"),
]


class WireTable(TomlTable):
    """`[collectives.wires.KIND]`."""

    launch_s: DurationKey | None = None
    step_s: DurationKey | None = None
    gap_s: DurationKey | None = None
    incast_s: DurationKey | None = None
    reduce_s: DurationKey | None = None
    efficiency: ShareKey | None = None
    busy_s: DurationKey | None = None
    busy_bytes_per_s: AmountKey | None = None


WiresByKind = Annotated[
    dict[str, Annotated[WireTable, Meta(description="a table")]], Meta(description="a table of kinds of wires")
]


class OverheadsTable(TomlTable):
    """What `[collectives]`, `[collectives.host_copies]` and `[collectives.between_nodes]` have in common."""

    launch_s: DurationKey | None = None
    cut_through: DurationKey | None = None
    memory_bytes_per_s: AmountKey | None = None
    cached_bytes: AmountKey | None = None
    cached_bytes_per_s: AmountKey | None = None
    memory_efficiency: ShareKey | None = None
    reducer_bytes_per_s: AmountKey | None = None
    serial_reduction: Flag | None = None
    chunk_pieces: AmountKey | None = None
    slices: AmountKey | None = None
    slice_bytes: AmountKey | None = None
    shared_loop: Flag | None = None
    cores: AmountKey | None = None
    crowding: AmountKey | None = None
    wake_s: DurationKey | None = None
    meeting_s: DurationKey | None = None
    phase_s: DurationKey | None = None
    piece_s: DurationKey | None = None
    inline_bytes: AmountKey | None = None
    handing_s: DurationKey | None = None
    spread_bytes: AmountKey | None = None
    spread_bytes_per_s: AmountKey | None = None
    copied_bytes_per_s: AmountKey | None = None
    shared_memory: Flag | None = None
    wires: WiresByKind | None = None

    def __post_init__(self) -> None:
        for name, told in (("slices", self.slices), ("chunk_pieces", self.chunk_pieces), ("cores", self.cores)):
            count = told.value if isinstance(told, Amount) else told
            if count is not None and count != int(count):
                raise wrong(name, "a whole number", count)
        times = self.crowding.value if isinstance(self.crowding, Amount) else self.crowding
        if times is not None and times < 1:
            raise wrong("crowding", "1 or more", times)
        through = self.cut_through.value if isinstance(self.cut_through, Duration) else self.cut_through
        if through is not None and through > 1:
            raise wrong("cut_through", "a share from 0 to 1", through)
        if isinstance(self.memory_efficiency, ShareTable) and self.memory_efficiency.points:
            raise ValueError("memory_efficiency.points: expected a value, because memories know no messages")

    def overheads(self, where: str, usual: Overheads | None = None) -> Overheads:
        """Return the record: what is not said is as usual."""
        rest = usual or Overheads()
        wires = {wire.kind: wire for wire in rest.wires}
        for kind, table in (self.wires or {}).items():
            wires[kind] = _wire(kind, table, wires.get(kind, WireOverheads(kind=kind)), where)
        return Overheads(
            launch_s=figure_or_none(self.launch_s, where) or rest.launch_s,
            cut_through=figure_or_none(self.cut_through, where) or rest.cut_through,
            memory_bytes_per_s=figure_or_none(self.memory_bytes_per_s, where) or rest.memory_bytes_per_s,
            cached_bytes=figure_or_none(self.cached_bytes, where) or rest.cached_bytes,
            cached_bytes_per_s=figure_or_none(self.cached_bytes_per_s, where) or rest.cached_bytes_per_s,
            memory_efficiency=_value(self.memory_efficiency, where) or rest.memory_efficiency,
            reducer_bytes_per_s=figure_or_none(self.reducer_bytes_per_s, where) or rest.reducer_bytes_per_s,
            serial_reduction=rest.serial_reduction if self.serial_reduction is None else self.serial_reduction,
            chunk_pieces=figure_or_none(self.chunk_pieces, where) or rest.chunk_pieces,
            slices=figure_or_none(self.slices, where) or rest.slices,
            slice_bytes=figure_or_none(self.slice_bytes, where) or rest.slice_bytes,
            shared_loop=rest.shared_loop if self.shared_loop is None else self.shared_loop,
            cores=figure_or_none(self.cores, where) or rest.cores,
            crowding=figure_or_none(self.crowding, where) or rest.crowding,
            wake_s=figure_or_none(self.wake_s, where) or rest.wake_s,
            meeting_s=figure_or_none(self.meeting_s, where) or rest.meeting_s,
            phase_s=figure_or_none(self.phase_s, where) or rest.phase_s,
            piece_s=figure_or_none(self.piece_s, where) or rest.piece_s,
            inline_bytes=figure_or_none(self.inline_bytes, where) or rest.inline_bytes,
            handing_s=figure_or_none(self.handing_s, where) or rest.handing_s,
            spread_bytes=figure_or_none(self.spread_bytes, where) or rest.spread_bytes,
            spread_bytes_per_s=figure_or_none(self.spread_bytes_per_s, where) or rest.spread_bytes_per_s,
            copied_bytes_per_s=figure_or_none(self.copied_bytes_per_s, where) or rest.copied_bytes_per_s,
            shared_memory=rest.shared_memory if self.shared_memory is None else self.shared_memory,
            wires=tuple(wires.values()),
        )


OverheadsKey = Annotated[OverheadsTable | None, Meta(description="a table")]


class ProgramTable(TomlTable):
    """`[collectives.program]`."""

    launch_s: DurationKey | None = None
    barrier_s: DurationKey | None = None
    doubling_s: DurationKey | None = None
    trigger_s: DurationKey | None = None


class LibraryTable(TomlTable):
    """`[collectives.library]`."""

    algorithms: Texts
    source: Text = ""
    confidence: Confidence = "E"

    def __post_init__(self) -> None:
        if not self.algorithms:
            raise ValueError("algorithms: expected names such as 'ring', found none")

    def record(self, where: str) -> Library:
        """Return the record."""
        return Library(algorithms=self.algorithms, source=self.source or where, confidence=self.confidence)


class CollectivesTable(OverheadsTable):
    """`[collectives]`."""

    host_copies: OverheadsKey = None
    between_nodes: OverheadsKey = None
    program: Annotated[ProgramTable | None, Meta(description="a table")] = None
    library: Annotated[LibraryTable | None, Meta(description="a table")] = None

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Yield the kinds of wires that are spoken of, each after its key."""
        yield from (("collectives.wires", kind) for kind in self.wires or ())
        for name in ("host_copies", "between_nodes"):
            table: OverheadsTable | None = getattr(self, name)
            yield from ((f"collectives.{name}.wires", kind) for kind in (table.wires or () if table else ()))

    def record(self, where: str) -> Collectives:
        """Return the record."""
        usual, program = self.overheads(where), self.program or ProgramTable()
        return Collectives(
            usual=usual,
            host_copies=self.host_copies.overheads(where, usual) if self.host_copies else None,
            between_nodes=self.between_nodes.overheads(where, usual) if self.between_nodes else None,
            program=Program(
                launch_s=figure_or_none(program.launch_s, where),
                barrier_s=figure_or_none(program.barrier_s, where),
                doubling_s=figure_or_none(program.doubling_s, where),
                trigger_s=figure_or_none(program.trigger_s, where),
            ),
            library=self.library.record(where) if self.library else None,
        )


def _wire(kind: str, table: WireTable, rest: WireOverheads, where: str) -> WireOverheads:
    return WireOverheads(
        kind=kind,
        launch_s=figure_or_none(table.launch_s, where) or rest.launch_s,
        step_s=figure_or_none(table.step_s, where) or rest.step_s,
        gap_s=figure_or_none(table.gap_s, where) or rest.gap_s,
        incast_s=figure_or_none(table.incast_s, where) or rest.incast_s,
        reduce_s=figure_or_none(table.reduce_s, where) or rest.reduce_s,
        efficiency=_share(table.efficiency, where) or rest.efficiency,
        busy_s=figure_or_none(table.busy_s, where) or rest.busy_s,
        busy_bytes_per_s=figure_or_none(table.busy_bytes_per_s, where) or rest.busy_bytes_per_s,
    )


def _share(given: float | ShareTable | None, where: str) -> Figure | Curve | None:
    if isinstance(given, ShareTable) and given.points:
        return Curve(points=given.points, source=given.source or where, confidence=given.confidence)
    return _value(given, where)


def _value(given: float | ShareTable | None, where: str) -> Figure | None:
    if isinstance(given, ShareTable):
        assert given.value is not None
        return Figure(value=given.value, source=given.source or where, confidence=given.confidence)
    return None if given is None else figure(given, where)
