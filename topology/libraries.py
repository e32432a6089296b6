"""Libraries of collectives that come with machines, as records: the algorithms that exist, and their times.

A machine file names one of the files in `data/libraries/` by `[collectives.library] use = "nccl"`, and says what of it
applies; or it lists schedules itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

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


def version_of(text: str) -> tuple[int, ...]:
    """Return a version in a form that compares: "2.18" is after "2.4"."""
    return tuple(int(part) for part in text.split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Synchronisation of an algorithm: by flags beside the data, or after a whole chunk."""

    kind: str  # as the library calls it
    base_s: Seconds = 0.0  # of an operation
    inside_s: Seconds = 0.0  # of a hop inside a node
    between_s: Seconds = 0.0  # of a hop between nodes, besides the latency of the network
    waits: Count = 1  # how often a hop between nodes waits for that latency: for the data, and to flush it
    posts: Count = 1  # messages that the processor posts for a step
    share: Part = 1.0  # of a wire's bandwidth that is left beside flags
    low_latency: bool = False  # whether the limits of processors and chips for words with flags apply
    chunk_bytes: Bytes | None = None  # of a tree's pieces in a channel; None: those of the library's buffer
    plateau: Factor = 1.0  # factor of the latency of an all-reduce between nodes, where a ring waits for its chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An algorithm of a library."""

    name: str  # as the library calls it
    operations: Texts  # collectives that it carries out
    since: str = "0"  # the first version that has it
    # what it does: "ring" around all ranks, as many as there are adapters; "chain" through them; "tree" between nodes
    # over chains inside; "switch" sums in the switch of a node, "switch_tree" does so below a tree, "fabric" below the
    # switches of the network; "pat" doubles distances between nodes of one rank.
    shape: Shape = ""
    schedule: str = ""  # our schedule that does the same, if there is one; it is priced as such
    nodes: Literal["any", "one", "several", "alone"] = "any"  # "alone": several, of one rank each
    least_ranks: Count = 1  # on a node
    # pieces in which sums in switches follow each other, the largest first: the bytes of a channel and rank, and for
    # how many rounds of all channels and ranks a vector must suffice to be cut so.
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
    low_latency_bytes_per_s: Rate  # of words with flags inside a node
    switch_share: Part | None = None  # of its wires' bandwidth where the switch sums; None: it has no such switch
    switch_channels: Count = 16  # through which it does so on one node
    switch_channels_between: Count = 16  # likewise, on several


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Properties of the host's processors that a library depends on."""

    kind: str  # their maker
    post_s: Seconds  # to post a message to an adapter
    low_latency_bytes_per_s: Rate  # of words with flags between two nodes
    low_latency_beyond_two_bytes_per_s: Rate  # likewise, between more


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The machine's own library. No schedule that it lacks prices a measurement, or is promised to its users."""

    source: str  # as of a figure
    confidence: Literal["A", "B", "C", "D", "E"]  # as of a figure
    algorithms: Texts = ()  # schedules of ours that it has too, as plans spell them
    operations: Texts = ()  # collectives that this list speaks of; all if empty
    name: str = "the machine's library"
    version: str = "0"  # the version whose algorithms exist
    chosen: str = ""  # how it chooses among them
    wires: Texts = ()  # kinds of wires inside nodes that it runs over; any if empty
    generation: str = ""  # of the machine's chips
    processor: str = ""  # maker of the host's processors
    protocols_between: Texts = ()  # protocols that the network carries; all if empty
    without: Texts = ()  # algorithms that the machine's settings switch off
    # of a channel's buffer: in such pieces trees pass data on, from a version on; before, and if None: as suits them
    chunk_bytes: Bytes | None = None
    chunk_since: str = "0"
    channels_of_rail: Count = 1  # channels for each adapter that a device has for itself
    models: Annotated[tuple[Model, ...], Words("tables")] = ()  # algorithms with the library's own times
    generations: Annotated[tuple[Generation, ...], ByName("a table of generations")] = ()
    processors: Annotated[tuple[Processors, ...], ByName("a table of processors")] = ()

    def __post_init__(self) -> None:
        if not self.algorithms and not self.models:
            raise ValueError("algorithms: expected names such as 'ring', found none")
        for key in ("version", "chunk_since"):
            if not _VERSION.fullmatch(getattr(self, key)):
                raise wrong(key, "a version such as '2.18'", getattr(self, key))
        for key, found, known in (
            ("generation", self.generation, [each.kind for each in self.generations]),
            ("processor", self.processor, [each.kind for each in self.processors]),
        ):
            if known and found not in known:
                raise wrong(key, f"one of {', '.join(known)}", found)
        protocols = {protocol.kind for model in self.models for protocol in model.protocols}
        for key, listed, names in (
            ("protocols_between", self.protocols_between, protocols),
            ("without", self.without, {model.name for model in self.models}),
        ):
            if strange := [each for each in listed if each not in names]:
                raise wrong(key, f"names among {', '.join(sorted(names)) or 'none'}", strange[0])

    @property
    def label(self) -> str:
        """Name and version in one."""
        return self.name if self.version == "0" else f"{self.name} {self.version}"

    def has(self, operation: str) -> tuple[Model, ...]:
        """Return the algorithms of its version for an operation."""
        now = version_of(self.version)
        return tuple(each for each in self.models if operation in each.operations and version_of(each.since) <= now)

    @property
    def chunk(self) -> int | None:
        """Bytes of the pieces in which trees of its version pass data on; None if they are as suits the vector."""
        return self.chunk_bytes if version_of(self.version) >= version_of(self.chunk_since) else None

    def speaks_of(self, operation: str) -> bool:
        """Tell whether it is known what the library does for an operation."""
        listed = bool(self.algorithms) and (not self.operations or operation in self.operations)
        return listed or any(operation in each.operations for each in self.models)

    def runs(self, operation: str, schedules: tuple[str, ...]) -> bool:
        """Tell whether the library has a schedule of ours, given the names of what it is made of."""
        if self.algorithms and (not self.operations or operation in self.operations):
            return all(each in self.algorithms for each in schedules)
        return any((each.schedule,) == schedules for each in self.has(operation))

    def of_chips(self) -> Generation | None:
        """Return what the machine's chips give it; None where the library does not ask for that."""
        return next((each for each in self.generations if each.kind == self.generation), None)

    def of_processors(self) -> Processors | None:
        """Return what the host's processors give it; None where the library does not ask for that."""
        return next((each for each in self.processors if each.kind == self.processor), None)
