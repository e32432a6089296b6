"""Libraries of collectives that come with machines, as records: the algorithms that exist, and their times.

A machine file names one of the files in `data/libraries/` by `[collectives.library] use = "nccl"`, and the parts of it
that apply; or it lists schedules itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal
from warnings import warn

from .keys import ByName, Count, Numbers, Pairs, Texts, Words, wrong

Shape = Literal["", "ring", "chain", "tree", "switch", "switch_tree", "fabric", "pat"]
_SECONDS = Numbers("a number of seconds, 0 or more", least=0)
_RATE = Numbers("a number of bytes per second, more than 0", above=0)
_SHARE = Numbers("a share, more than 0 and at most 1", above=0, most=1)
_FACTOR = Numbers("a factor, 1 or more", least=1)
Seconds = Annotated[float, _SECONDS]
Rate = Annotated[float, _RATE]
Part = Annotated[float, _SHARE]
Factor = Annotated[float, _FACTOR]
Bytes = Annotated[int, Numbers("a whole number of bytes, 1 or more", least=1, whole=True)]

_VERSION = re.compile(r"\d+(\.\d+)*")


def parse_version(text: str) -> tuple[int, ...]:
    """Return a version as numbers that compare: "2.18" is after "2.4"."""
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Synchronisation of an algorithm: by flags beside the data, or after a whole chunk."""

    kind: str  # the library's name of it
    base_s: Seconds = 0.0  # time of an operation
    inside_s: Seconds = 0.0  # time of a hop inside a node
    between_s: Seconds = 0.0  # time of a hop between nodes, besides the latency of the network
    waits: Count = 1  # waits of a hop between nodes for that latency: for the data, and to flush it
    posts: Count = 1  # messages that the processor posts for a step
    share: Part = 1.0  # share of a wire's bandwidth that flags leave to data
    low_latency: bool = False  # whether the limits of processors and chips for words with flags apply
    chunk_bytes: Bytes | None = None  # size of a tree's pieces in a channel; None: as in the library's buffer
    plateau: Factor = 1.0  # factor of the latency of an all-reduce between nodes, where a ring waits for its chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryAlgorithm:
    """An algorithm of a library."""

    name: str  # the library's name of it
    operations: Texts  # collectives that it carries out
    since: str = "0"  # the first version that has it
    # shape of the algorithm: "ring" around all ranks, as many as there are adapters; "chain" through them; "tree"
    # between nodes over chains inside; "switch" sums in the switch of a node, "switch_tree" does so below a tree,
    # "fabric" below the switches of the network; "pat" doubles distances between nodes of one rank.
    shape: Shape = ""
    schedule: str = ""  # our schedule that does the same, if there is one; it is priced as such
    nodes: Literal["any", "one", "several", "alone"] = "any"  # "alone": several, of one rank each
    least_ranks: Count = 1  # least number of ranks on a node
    # pieces in which sums in switches follow each other, the largest first: the bytes of a channel and rank, and the
    # number of rounds of all channels and ranks for which a vector must suffice to be cut so.
    chunks: Pairs = ()
    chunk_from_four_nodes: Bytes | None = None  # the largest of these from four nodes on
    protocols: Annotated[tuple[Protocol, ...], ByName("a table of protocols")] = ()

    def __post_init__(self) -> None:
        if not _VERSION.fullmatch(self.since):
            raise wrong("since", "a version such as '2.18'", self.since)
        if bool(self.shape) == bool(self.schedule):
            raise wrong("shape", "a shape or a schedule, one of the two", self.shape)
        if self.shape and not self.protocols:
            raise ValueError("protocols: missing, expected a table of protocols, because there is a shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Properties of the chips of a generation that a library depends on."""

    kind: str  # its name
    low_latency_bytes_per_s: Rate  # rate of words with flags inside a node
    switch_share: Part | None = None  # share of its wires' bandwidth where the switch sums; None: no such switch
    switch_channels: Count = 16  # channels of sums in the switch on one node
    switch_channels_between: Count = 16  # channels of sums in the switch on several nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Properties of the host's processors that a library depends on."""

    kind: str  # their maker
    post_s: Seconds  # to post a message to an adapter
    low_latency_bytes_per_s: Rate  # rate of words with flags between two nodes
    low_latency_beyond_two_bytes_per_s: Rate  # rate of words with flags between more nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The machine's own library. No schedule that it lacks prices a measurement, or is promised to its users."""

    source: str  # as in a figure
    confidence: Literal["A", "B", "C", "D", "E"]  # as in a figure
    algorithms: Texts = ()  # our schedules that it has too, in the names of plans
    operations: Texts = ()  # collectives that this list covers; all if empty
    name: str = "the machine's library"
    version: str = "0"  # the version that has the algorithms
    chosen: str = ""  # its way of choosing among them
    wires: Texts = ()  # kinds of wires inside nodes that it runs over; any if empty
    generation: str = ""  # generation of the machine's chips
    processor: str = ""  # maker of the host's processors
    protocols_between: Texts = ()  # protocols that the network carries; all if empty
    without: Texts = ()  # algorithms that the machine's settings switch off
    # size of the pieces of a channel's buffer in which trees pass data on, from `chunk_since` on; before, and if None,
    # pieces suit the vector
    chunk_bytes: Bytes | None = None
    chunk_since: str = "0"
    channels_of_rail: Count = 1  # channels for each adapter that a device has for itself
    models: Annotated[tuple[LibraryAlgorithm, ...], Words("tables")] = ()  # algorithms with the library's own times
    generations: Annotated[tuple[Generation, ...], ByName("a table of generations")] = ()
    processors: Annotated[tuple[Processors, ...], ByName("a table of processors")] = ()

    def __post_init__(self) -> None:
        if not self.algorithms and not self.models:
            raise ValueError("algorithms: expected names such as 'ring', found none")
        for key in ("version", "chunk_since"):
            if not _VERSION.fullmatch(getattr(self, key)):
                raise wrong(key, "a version such as '2.18'", getattr(self, key))
        for key, value, known in (
            ("generation", self.generation, [entry.kind for entry in self.generations]),
            ("processor", self.processor, [entry.kind for entry in self.processors]),
        ):
            if known and value not in known:
                raise wrong(key, f"one of {', '.join(known)}", value)
        protocols = {protocol.kind for model in self.models for protocol in model.protocols}
        for key, listed, names in (
            ("protocols_between", self.protocols_between, protocols),
            ("without", self.without, {model.name for model in self.models}),
        ):
            if strange := [entry for entry in listed if entry not in names]:
                raise wrong(key, f"names among {', '.join(sorted(names)) or 'none'}", strange[0])

    @property
    def label(self) -> str:
        """Name and version of the library."""
        return self.name if self.version == "0" else f"{self.name} {self.version}"

    def has(self, operation: str) -> tuple[LibraryAlgorithm, ...]:
        """Return the algorithms of the library's version for an operation."""
        now = parse_version(self.version)
        return tuple(
            model for model in self.models if operation in model.operations and parse_version(model.since) <= now
        )

    @property
    def chunk(self) -> int | None:
        """Size in bytes of the pieces in which trees of its version pass data on; None if it suits the vector."""
        return self.chunk_bytes if parse_version(self.version) >= parse_version(self.chunk_since) else None

    def covers(self, operation: str) -> bool:
        """Whether the record covers the library's algorithms for an operation."""
        listed = bool(self.algorithms) and (not self.operations or operation in self.operations)
        return listed or any(operation in model.operations for model in self.models)

    def speaks_of(self, operation: str) -> bool:
        """Old name of `covers`."""
        warn("Library.speaks_of is now covers; the old name goes with the next version", DeprecationWarning, 2)
        return self.covers(operation)

    def runs(self, operation: str, schedules: tuple[str, ...]) -> bool:
        """Whether the library has a schedule of ours, given the names of its phases."""
        if self.algorithms and (not self.operations or operation in self.operations):
            return all(schedule in self.algorithms for schedule in schedules)
        return any((model.schedule,) == schedules for model in self.has(operation))

    def of_chips(self) -> Generation | None:
        """Return the properties of the machine's chips; None if the library does not depend on them."""
        return next((entry for entry in self.generations if entry.kind == self.generation), None)

    def of_processors(self) -> Processors | None:
        """Return the properties of the host's processors; None if the library does not depend on them."""
        return next((entry for entry in self.processors if entry.kind == self.processor), None)
