"""Match of the ends of one operation: its key, its ends, and the error if they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from ..collectives.call import Call
from ..errors import CollectiveMismatchError
from .operation import Operation

CHANNEL_BITS = 8


class Key(NamedTuple):
    """Name of a communicator, the same on every rank."""

    ranks: tuple[int, ...]  # World ranks of the group, in its order
    occurrence: int  # Number among the groups with these ranks
    stream: str  # Name of the stream; "" for messages
    src: int = -1  # Group rank that sends messages; -1 for collectives
    dst: int = -1  # Group rank that receives messages; -1 for collectives
    tag: int = -1  # Tag of messages; for parts of trees, their place (see `tree_operation`)

    @property
    def messages(self) -> bool:
        """Whether the key names the messages of two ranks, not collectives."""
        return self.src >= 0

    @property
    def ends(self) -> tuple[int, int]:
        """World ranks of the sender and the receiver of messages."""
        return self.ranks[self.src], self.ranks[self.dst]

    @property
    def group(self) -> Key:
        """Key of the group: the same for all its communicators."""
        return Key(self.ranks, self.occurrence, "")

    @property
    def id(self) -> int:
        """Id of 40 bits for messages between processes."""
        return self.tag_base() >> 24

    def with_any_tag(self) -> Key:
        """Return the key of messages of all tags between the two ranks."""
        return self._replace(tag=0)

    def tag_base(self, *more: object) -> int:
        """Return 40 bits of a hash of the key, and of more values that must be the same, above 24 free bits."""
        text = repr((*self, *more)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=5).digest(), "big") << 24


class RankCall(NamedTuple):
    """The call of one rank."""

    rank: int  # World rank
    call: Call  # Call that the rank issued
    call_site: str  # Line that issued it


class Match(list["Operation | None"]):
    """The members' ends of one operation by place, as they arrive; None for an end that has not arrived.

    A list, because one is made for every operation, and a constructor in Python takes as long as all its fields.

    Attributes:
        arrived: Number of ends that have arrived.
        pattern: Call of the first arrival, or of the first with dtype and shape.
        first: The operation with that call.
        error: Maker of the error of each end.
        ended: Number of ends here that are over.
        disputed: Whether ends differ, and more must arrive before the minority is clear.
        asked: Whether the other processes know that ranks wait here.
        assumed: Whether its pattern is only inferred from the array for the result.
        remote_calls: Known calls of ranks of other processes.
    """

    arrived = ended = 0
    asked = assumed = False
    remote_calls: Mapping[int, RankCall] = MappingProxyType({})
    pattern: Call | None = None
    first: Operation | None = None
    error: Callable[[], BaseException] | None = None
    disputed = False

    @property
    def ends(self) -> list[Operation]:
        """The ends that have arrived."""
        return [end for end in self if end is not None]

    @property
    def started_ns(self) -> int:
        """Start time of the first end here."""
        return min((end.started_ns for end in self if end is not None), default=0)


class Unfit(Exception):
    """One end of an operation cannot take part; `__cause__` has the reason."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation.label)
        self.operation = operation


def minority_and_majority(rank_calls: Sequence[RankCall]) -> tuple[list[RankCall], list[RankCall]]:
    """Return the smallest and the largest side of ranks that agree; of equal sides, the later one is the minority."""
    sides: list[list[RankCall]] = []
    for rank_call in rank_calls:
        side = next((side for side in sides if side[0].call.agrees(rank_call.call)), None)
        if side is None:
            sides.insert(0, [rank_call])
        else:
            side.append(rank_call)
    return min(sides, key=len), max(reversed(sides), key=len)


def mismatch(
    group: str, seq: int, first: tuple[int, object, str], second: tuple[int, object, str]
) -> Callable[[], CollectiveMismatchError]:
    """Return the maker of the error for two ranks that differ in operation `seq`: a `RankCall` of each, or its text."""
    return partial(
        CollectiveMismatchError,
        group=group,
        seq=seq,
        ranks=(first[0], second[0]),
        calls=(str(first[1]), str(second[1])),
        call_sites=(first[2], second[2]),
    )
