"""Groups of ranks: an ordered set that issues collectives together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from ..collectives.kinds import Collective
from ..collectives.reduce import Array
from ..diagnostics import calling
from ..errors import UsageError
from .calls import Calls, Input
from .communicator import Port
from .future import Future
from .memory.foreign import as_output, changes
from .operation import CollectiveFuture
from .stream import Stream

if TYPE_CHECKING:
    from .rank import Rank

__all__ = ["Group"]

_TAGS = 1 << 24


class Group(Calls):
    """One rank's view of an ordered set of ranks.

    Make one with `rank.group(ranks)`, which needs no communication, or `await group.split(color)`.

    Attributes:
        ranks: World ranks in group order.
        rank: The index of this rank in the group.
        size: How many ranks there are.
        name: For messages and the timeline.
    """

    def __init__(self, owner: Rank, ranks: tuple[int, ...], *, name: str, occurrence: int) -> None:
        self.ranks, self.name = ranks, name
        self.size = len(ranks)
        self.label = (name, ranks)
        self.rank = ranks.index(owner.rank)
        self._owner = owner
        self._key = (ranks, occurrence)
        self._ports: dict[object, Port] = {}
        self._comm = self
        self._world = owner._world
        self._now_ns = owner._world.now_ns

    def __repr__(self) -> str:
        return f"<Group '{self.name}' of ranks {list(self.ranks)}, this is {self.rank}>"

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a sub-group of group ranks `ranks`, in that order; every member must make the same call.

        Raises:
            UsageError: If a rank is unknown or named twice, or this rank is not among them.
        """
        for member in ranks:
            self._check_rank("ranks", member)
        return self._owner._new_group(tuple(self.ranks[member] for member in ranks), name)

    async def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Group | None:
        """Cut the group into one group for each color, ordered by `key`, then by rank; None takes no part.

        A collective: every rank of the group must call it.

        Raises:
            UsageError: If `color` or `key` is no integer.
        """
        for argument, value in (("color", 0 if color is None else color), ("key", key)):
            if not isinstance(value, (int, np.integer)):
                raise UsageError(f"{argument}: expected an integer, got {value!r}")
        mine = np.array([color is not None, color or 0, key], np.int64)
        gathered = self._issue(Collective.ALL_GATHER, mine, calling()[0], 0, None, "split")
        told = self._world.clock.notes(self._key, gathered.seq)  # where arrays have no data
        told[self.rank] = mine.tolist()
        choices = (await gathered).reshape(self.size, 3).tolist()
        if self._world.clock.shapes_only:
            choices = self._told(told)
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (takes_part, c, k) in enumerate(choices) if takes_part and c == color)
        return self.group([rank for _, rank in chosen], name=name or f"{self.name}/{color}")

    def _told(self, told: Mapping[int, list[int]]) -> list[list[int]]:
        if len(told) < self.size:
            raise UsageError("split: where ranks stand for others, nobody knows what these choose; use rank.mesh")
        return [told[rank] for rank in range(self.size)]

    # -- issuing -----------------------------------------------------------------------------------------------

    def _issue(
        self,
        kind: Collective,
        x: Input | None,
        frame: FrameType,
        priority: int,
        stream: Stream | str | None,
        name: str | None,
        op: str | None = None,
        out: object = None,
        root: int = 0,
        pairs: tuple[tuple[int, int], ...] = (),
        port: Port | None = None,
    ) -> CollectiveFuture[Array]:
        """Check, number and start an operation: at once if its stream has room, which short latencies need."""
        if port is None:
            port = self._ports.get(stream) or self._open_port(stream)
        target = None
        if out is not None:
            target = self._target(kind, out)
            if x is out:
                x = target
        if self._world.failure is not None:
            raise self._world.peer_failed()
        if not isinstance(priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {priority!r}")
        operation: CollectiveFuture[Array] = CollectiveFuture(kind, self, port, x, target, (op, root, pairs))
        if out is not target:
            operation.given = out
            operation.changed = changes(out) if x is target else None
        if not isinstance(x, Future):
            operation.prepare()
        lane = port.stream
        operation.seq = port.next_seq
        port.next_seq += 1
        operation.priority = priority + lane.priority
        operation.name = name or kind._value_
        operation._code, operation._instruction = frame.f_code, frame.f_lasti
        operation.issued_ns = operation.started_ns = self._now_ns()
        lane.enqueue(operation)
        return operation

    def _target(self, kind: Collective, out: object) -> Array:
        """Return the array that a result is written to."""
        if self._world.clock.shapes_only and isinstance(out, np.ndarray):
            return out  # there is nothing to write
        return as_output(out, "out" if kind is not Collective.P2P else "like")

    def _open_port(self, stream: Stream | str | None) -> Port:
        known = self._owner._find_stream(stream)
        channel = self._world.channel((*self._key, known.name), self.name, self.ranks)
        port = self._ports[stream] = self._ports.setdefault(known, Port(channel, self.rank, known))
        return port

    def _p2p_port(self, argument: str, peer: int, tag: int, stream: Stream | str | None, *, sending: bool) -> Port:
        """The lane of one (source, destination, tag): strict FIFO, and no part of its stream's window."""
        self._check_rank(argument, peer)
        peer = int(peer)  # a numpy integer would name another channel in another process
        if not isinstance(tag, int) or not 0 <= tag < _TAGS:
            raise UsageError(f"tag: must be from 0 to {_TAGS - 1}, got {tag!r}")
        port = self._ports.get((peer, tag, sending))
        if port is None:
            lane = self._owner._find_stream(stream)
            ends = (self.rank, peer) if sending else (peer, self.rank)
            members = (self.ranks[ends[0]], self.ranks[ends[1]])
            channel = self._world.channel((*self._key, "p2p", *ends, tag), self.name, members)
            fifo = Stream(self._owner, lane.name, priority=lane.priority, window=1)
            towards = f" {'to' if sending else 'from'} rank {self.ranks[peer]}" + (f" with tag {tag}" if tag else "")
            port = self._ports[peer, tag, sending] = Port(channel, 0 if sending else 1, fifo, towards)
        return port

    # -- checks ------------------------------------------------------------------------------------------------

    def _check_rank(self, argument: str, rank: int) -> None:
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < self.size:
            raise UsageError(f"{argument}: expected 0 to {self.size - 1}, a rank of group '{self.name}', got {rank!r}")

    def _check_root(self, root: int, x: object, kind: Collective, *, out: object = None) -> None:
        self._check_rank("root", root)
        if x is None and (root == self.rank or kind in (Collective.REDUCE, Collective.GATHER)):
            raise UsageError(f"x: {kind.value} needs an array on rank {self.rank}, got None")
        if out is not None and root != self.rank:
            raise UsageError(f"out: only the root {root} of {kind.value} gets a result, this is rank {self.rank}")

    def _check_pairs(self, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        try:
            checked = tuple((src, dst) for src, dst in pairs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"pairs: expected (source, destination) pairs of ranks, got {pairs!r}") from error
        for index, role in enumerate(("source", "destination")):
            ranks = [pair[index] for pair in checked]
            for rank in ranks:
                self._check_rank("pairs", rank)
            if len(set(ranks)) < len(ranks):
                twice = next(rank for rank in ranks if ranks.count(rank) > 1)
                raise UsageError(f"pairs: rank {twice} is a {role} twice in {list(checked)}; each may be one once")
        return tuple((int(src), int(dst)) for src, dst in checked)
