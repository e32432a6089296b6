"""Inbox of a process: the messages that its ranks send and receive, until both ends of each have ended.

A lane has the messages of one sender for one receiver with one tag on one group. It is strict FIFO at both of its ends:
only the first send and the first receive of it are under way. Inside a process they match here, when both have arrived;
between processes a wire matches them. Messages take no room in the window of a stream, because their order differs
between ranks. Receives from any source wait in a queue, and choose among the lanes of their receiver, tag and group.
Lanes and queues without messages are removed at once.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from transports import LinkLostError

from ..collectives.reduce import Array
from ..errors import RankLeftError
from . import transfer
from .failure import Failure
from .lane import Lane, LaneName, Queue, QueueName, lane_id, wire_tag
from .match import RankCall, failed_before, gave_up, mismatch
from .message import ARRIVALS, Message, Returned
from .state import ADMITTED, DONE, ISSUED, MATCHING
from .stream import activate_late

if TYPE_CHECKING:
    from transports import Envelope

    from .communicators import Communicators

_NUMBERED = 1 << 16  # idle lanes with numbers of messages; then these begin at 0, for a tag may be used once


class Inbox:
    """Messages of the ranks of one process.

    Attributes:
        shared: State of the world.
        here: World ranks of this process; None: all.
        lanes: Lanes with messages, by name.
        queues: Queues of receives from any source, by name.
        numbers: World ranks of the sender and the receiver of lanes, and the numbers of their next messages there. Of
            lanes without messages only those are kept that differ, or whose messages go over a wire.
        arrive: Lets a message arrive, the first of its lane: matches it, unless an interceptor holds it.

    Args:
        shared: State of the world.
    """

    shared: Communicators
    here: frozenset[int] | None

    def __init__(self, shared: Communicators) -> None:
        self.shared, self._engine, self.here = shared, shared.engine, shared.local
        self.lanes: dict[LaneName, Lane] = {}
        self.queues: dict[QueueName, Queue] = {}
        self.numbers: dict[LaneName, tuple[tuple[int, ...], list[int]]] = {}
        self.arrive: Callable[[Message[Any]], None] = self.match

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def admit(self, message: Message[Any]) -> bool:
        """Put a message into its lane, and number it; return whether it is the first there."""
        group_id, peer, end, own = message.messages.group_id, message.peer, message.receives, message.member.rank
        lane: Any
        if peer is None:
            queue_name = group_id, own, message.tag
            lane = self.queues.get(queue_name)
            if lane is None:
                lane = self.queues[queue_name] = Queue(queue_name, message.member.key)
            line = lane.receives
        else:
            name = (group_id, own, message.tag, peer) if end else (group_id, peer, message.tag, own)
            lane = self.lanes.get(name) or self.open_lane(name, message)
            line = lane.lines[end]
            message.seq = lane.numbers[end]
            lane.numbers[end] += 1
        message.lane = lane
        line.append(message)
        return line[0] is message

    def open_lane(self, name: LaneName, message: Message[Any]) -> Lane:
        """Make the lane of a message with a peer."""
        wires, peer, members = message.messages.wires, cast("int", message.peer), message.members
        lane = self.lanes[name] = Lane()
        lane.name, lane.group, lane.members = name, message.member.key, members
        lane.by_wire = (wires[peer] if peer in wires else message.messages.wire(peer)) is not None
        lane.lines, lane.arrived, lane.returned = (deque(), deque()), [None, None], []
        numbers = self.numbers.get(name)
        if numbers is None:
            if len(self.numbers) >= _NUMBERED + len(self.lanes):
                self.numbers = {each: self.numbers[each] for each in self.lanes if each in self.numbers}
                self.shared.lost_count = True
            numbers = self.numbers[name] = members, [0, 0]
        lane.numbers = numbers[1]
        return lane

    def leave(self, message: Message[Any], failure: Failure | None, *, gives_back: bool = False) -> None:
        """Remove a message that has ended, or that gives its place back, and let the next one of its lane arrive.

        Args:
            message: The message.
            failure: Its error, if it has failed.
            gives_back: Whether its number goes to the next receive.
        """
        lane, message.lane = message.lane, None
        if message.state >= DONE:
            message._use = message.tree_memory = None
        if lane is None:
            return
        outstanding = message.context.outstanding
        outstanding.operations.pop(message, None)
        if outstanding.draining or failure is not None:
            outstanding.record_end(message, failure)
        if isinstance(lane, Lane):
            queue_name, end = lane.name[:3], message.receives
            line = lane.lines[end]
            if lane.arrived[end] is message:
                lane.arrived[end] = None
            if gives_back:
                lane.numbers[1] -= 1
                for later in line:
                    if later.seq > message.seq:
                        later.seq -= 1
        else:
            queue = cast("Queue", lane)
            queue_name, line = queue.name, queue.receives
            if queue.searching is message:
                queue.searching = None
                self._stop_waiting(queue)
        if line[0] is message:
            line.popleft()
            if line:
                line[0]._enter(ADMITTED)
                message.context.soon(partial(activate_late, line[0]))
        else:
            line.remove(message)
        if not isinstance(lane, Lane):
            if not line:
                self.queues.pop(queue_name, None)
        elif not (lane.lines[0] or lane.lines[1] or lane.returned):
            self.lanes.pop(lane.name, None)
            if lane.numbers[0] == lane.numbers[1] and not lane.by_wire:
                self.numbers.pop(lane.name, None)
        if self.queues and message.receives:
            self._search_soon(queue_name)

    # -- matching ------------------------------------------------------------------------------------------------------

    def match(self, message: Message[Any]) -> None:
        """Match a message that has arrived, or let it wait."""
        lane, shared = message.lane, self.shared
        if not isinstance(lane, Lane):  # a receive from any source
            message.lock()
            queue = cast("Queue", lane)
            queue.searching = message
            if message.at_once:
                self._search(queue)
            else:
                self._search_soon(queue.name)
            return
        end = message.receives
        if end and lane.returned:
            self._take_returned(lane, message)
            return
        if shared.broken and (broken := shared.broken.get(lane.group_id) or shared.broken.get(lane.id)):
            message.fail(Failure(broken()))
            return
        if lane.by_wire:
            if shared.left or shared.early:
                self._check_peer(lane, message)
            if message.state is MATCHING:
                message.messages.transfer(message)
            return
        other = lane.arrived[not end]
        if other is not None:
            lane.arrived[not end] = None
            send, receive = (other, message) if end else (message, other)
            if send.call is receive.call or receive.agrees(send.call, send.flat):
                try:
                    self._engine.carry(lane, send, receive, send.call)
                except Exception as unfit:  # no memory, or ranks that no wire of the model joins
                    self._fail_unfit(send, receive, unfit)
            else:
                self._fail_different(lane, send, receive)
            return
        lane.arrived[end] = message
        if not end or message.buffers is not None or message.locked or message.out is None:
            message.lock()
        elif not message.context.arrays.shapes_only:  # inlined from `lock`, for a short latency
            out = message.out
            message.target, message.locked = out.view(), message.context.locks.lock((out,), out)
        if shared.left and lane.members[not end] in shared.left:
            self._fail_if_left(lane, message, lane.members[not end])
        elif self.queues and not end:
            self._search_soon(lane.name[:3])

    def _check_peer(self, lane: Lane, message: Message[Any]) -> None:
        """Fail a message if the other end, in another process, is known not to take part."""
        self._fail_if_left(lane, message, lane.members[not message.receives])
        for error in self.shared.take_early(lane, message.seq):
            message.fail(Failure(error()))  # type: ignore[operator]  # ranks that wait for messages do not ask

    @staticmethod
    def _fail_unfit(send: Message[Any], receive: Message[Any], error: BaseException) -> None:
        """Fail both ends of a match that cannot be carried out."""
        peers_error = failed_before(receive, error)
        receive.fail(Failure(error))
        send.fail(Failure(peers_error()))

    @staticmethod
    def _fail_different(lane: Lane, send: Message[Any], receive: Message[Any]) -> None:
        """Fail both ends of a match that differ."""
        src, dst = lane.members
        error = mismatch(
            send.member.name,
            receive.seq,
            RankCall(dst, receive.call, receive.call_site),
            RankCall(src, send.call, send.call_site),
        )
        send.fail(Failure(error()))
        receive.fail(Failure(error()))

    def withdraw(self, message: Message[Any], failure: Failure) -> None:
        """Fail a message that cannot take part, and with it the other end, now or when that arrives."""
        lane, seq, failed = message.lane, message.seq, failed_before(message, failure.error)
        message.fail(failure)
        if not isinstance(lane, Lane):
            return
        if self.here is None or lane.members[not message.receives] in self.here:
            if not message.receives:
                self.put_back(lane, Returned(next(ARRIVALS), error=failed))
        else:
            self.shared.far.send_operation_failed(lane, seq, failed())

    def fail_broken_wire(self, message: Message[Any], error: BaseException) -> None:
        """Fail a message whose wire broke; if a report of the cause may be on its way, a moment later."""
        fail = partial(self.withdraw, message, Failure(error))
        if self.here is None or not isinstance(error, LinkLostError) or error.evident:
            fail()
        else:
            self.shared.far.hold_broken_end(message, error, fail)

    def fail_at(self, lane_id: int, seq: int, error: Callable[[], BaseException]) -> bool:
        """Fail a message here because of its other end, in another process; False if it has not arrived."""
        for lane in self.lanes.values():
            if lane.by_wire and lane.id == lane_id:
                for message in (*lane.lines[0], *lane.lines[1]):
                    if message.seq == seq:
                        message.fail(Failure(error()))
                        return True
        return False

    # -- messages that are given back ------------------------------------------------------------------------------

    def withdraw_receive(self, receive: Message[Any], later: Callable[[], None]) -> bool | None:
        """Take a receive out of matching, as if it had never been issued, unless a message has met it.

        Args:
            receive: The receive, which has arrived.
            later: Function to call once the transport has given it back, if that takes a task.

        Returns:
            Whether it is withdrawn now; None if that is still open.
        """
        if self.shared.intercept is not None and self.shared.intercept.withdraw(receive):
            return True
        if receive.request is not None:
            return transfer.withdraw(receive, later)
        lane = receive.lane
        return (lane.arrived[1] if isinstance(lane, Lane) else cast("Queue", lane).searching) is receive

    def give_back(self, receive: Message[Any], message: Returned) -> None:
        """Give the message of an ended receive to the next one of its lane."""
        name = receive.messages.lane_name(receive)
        self.put_back(self.lanes.get(name) or self.open_lane(name, receive), message)

    def put_back(self, lane: Lane, message: Returned, giver: Message[Any] | None = None) -> None:
        """Give a message that no task has taken to the next receive of its lane."""
        lane = self.lanes.setdefault(lane.name, lane)
        insort(lane.returned, message, key=lambda returned: returned.order)
        waiting = lane.lines[1][0] if lane.lines[1] else None
        if waiting is None or waiting is giver or waiting.state <= ADMITTED:
            self._search_soon(lane.name[:3])
        elif lane.arrived[1] is waiting:
            lane.arrived[1] = None
            self._take_returned(lane, waiting)
        elif waiting.request is not None and transfer.withdraw(waiting, partial(self._restart, waiting)):
            self.arrive(waiting)

    def _restart(self, receive: Message[Any]) -> None:
        """Let a receive arrive again that the transport has given back, so that it gets a returned message."""
        if not receive.done:
            self.arrive(receive)

    def _take_returned(self, lane: Lane, receive: Message[Any]) -> None:
        """Give a receive the oldest returned message; fail the receive if its call differs."""
        message = lane.returned.pop(0)
        receive.order = message.order
        try:
            if message.error is not None:
                raise message.error()
            pattern = message.call
            assert pattern is not None, "this is a bug in overlap: a returned message has no call"
            lane.numbers[1] -= 1  # the number belongs to a later message
            if not receive.agrees(pattern, message.flat):
                src, dst = lane.members
                raise mismatch(
                    receive.member.name,
                    receive.seq,
                    RankCall(src, pattern, "received before"),
                    RankCall(dst, receive.call, receive.call_site),
                )()
            receive.fit(pattern)
            if message.data is not None:
                cast(Array, receive.target).reshape(-1)[...] = message.data
        except Exception as error:  # no memory, or another call
            receive.fail(Failure(error))
            return
        receive.finish(receive.context.now_ns(), receive.describe(pattern, receive.started_ns))

    # -- receives from any source ------------------------------------------------------------------------------------

    def has_message(self, receive: Message[Any]) -> bool:
        """Whether a parked receive would meet a message at once."""
        if receive.asked is None and receive.messages.lane_name(receive)[:3] in self.queues:
            return False
        return self._find_oldest(receive, self._choices(receive)) is not None

    def _lanes_of(self, receive: Message[Any]) -> list[Lane]:
        """Return the lanes with messages that a receive could take, if it were the first."""
        name, asked = receive.messages.lane_name(receive)[:3], receive.asked
        senders = range(receive.member.size) if asked is None else (asked,)
        return [lane for src in senders if (lane := self.lanes.get((*name, src))) is not None]

    def _search_soon(self, name: QueueName) -> None:
        """Let the first receive from any source, if there is one, choose at a time when it may choose a message."""
        queue = self.queues.get(name)
        if queue is not None and queue.searching is not None:
            self._engine.choose_soon(queue.searching.context, partial(self._search, queue))

    def _search(self, queue: Queue, arrived: Envelope | None = None) -> None:
        """Take the oldest message; fail if none can come.

        Args:
            queue: The queue of the first receive.
            arrived: Message that another process has announced just now.
        """
        receive = queue.searching
        if receive is None:
            return
        self._stop_waiting(queue)
        if (broken := self.shared.broken.get(queue.name[0])) is not None:
            receive.fail(Failure(broken(), seen=True))
            return
        choices = self._choices(receive)
        oldest = self._find_oldest(receive, choices, arrived)
        if oldest is not None:
            receive.context.flight.ended(receive.record, receive.context.now_ns())
            self.leave(receive, None)
            receive.priority -= receive.port.stream.priority
            receive._enter(ISSUED)
            receive.peer = oldest[1]
            receive.members = queue.group.ranks[oldest[1]], receive.context.rank
            receive.messages.begin(receive)
        elif self._all_left(queue):
            rank = receive.context.rank
            cause = f"all other ranks finished their programs while rank {rank} waits in {receive.label}"
            receive.fail(Failure(RankLeftError(f"{cause} ({receive.call_site})", culprit=rank)))
        elif choices:
            queue.scope = trio.CancelScope()
            receive.context.spawn(self._wait_announced, queue, receive, choices, queue.scope)

    def _choices(self, receive: Message[Any]) -> list[tuple[int, int]]:
        """Return the world ranks in other processes that may send to a receive, and its tag on their wires.

        A sender that another receive names is none of them.
        """
        messages, asked = receive.messages, receive.asked
        if not messages.has_wires:
            return []
        named = {lane.name[3] for lane in self._lanes_of(receive) if lane.lines[1]}
        tag = wire_tag(messages.lane_name(receive))
        return [
            (rank, tag)
            for src, rank in enumerate(receive.member.label[1])
            if src not in named and asked in (None, src) and messages.wire(src) is not None
        ]

    def _find_oldest(
        self, receive: Message[Any], choices: list[tuple[int, int]], arrived: Envelope | None = None
    ) -> tuple[int, int] | None:
        """Return the start time and the sender of the oldest message for a receive; of one time, the lowest rank.

        Args:
            receive: The receive.
            choices: World ranks and tags of messages of other processes that it may take.
            arrived: Message that another process has announced just now.
        """
        offered = [(lane.offered_ns, lane.name[3]) for lane in self._lanes_of(receive)]
        if choices:
            announced = arrived or self._engine.oldest_announced(receive.context.rank, choices)
            if announced is not None and (announced.src, announced.tag) in choices:
                offered.append((announced.since_ns, receive.member.label[1].index(announced.src)))
        return min([(since_ns, src) for since_ns, src in offered if since_ns is not None], default=None)

    @staticmethod
    def _stop_waiting(queue: Queue) -> None:
        """Cancel the task that waits for announcements of other processes, if there is one."""
        if queue.scope is not None:
            queue.scope.cancel()
            queue.scope = None

    async def _wait_announced(
        self, queue: Queue, receive: Message[Any], choices: list[tuple[int, int]], scope: trio.CancelScope
    ) -> None:
        """Wait for an announcement of another process, then search again; a lost wire fails the receive."""
        with scope:
            try:
                arrived = await self._engine.wait_announced(receive.context.rank, choices)
            except Exception as error:  # the wire to a sender is lost
                if receive is queue.searching:
                    receive.fail(Failure(error))
                return
            # like `_search`, so that the next receive chooses only after this one has begun to take the message
            self._engine.choose_soon(receive.context, partial(self._search, queue, arrived))

    def forget(self, seq: int) -> None:
        """Do nothing: a lane drops a message when that ends."""

    # -- ends of ranks and groups ------------------------------------------------------------------------------------

    def give_up(self, message: Message[Any], failure: Failure) -> None:
        """Fail a message, and all present and later ones of its lane: the state of the other end is unknown."""
        lane, error = message.lane, gave_up(message, failure.error)
        message.fail(failure)
        if isinstance(lane, Lane) and not message.flat:  # of PyTorch the message alone
            self.shared.break_off(lane.id, error)
            if lane.by_wire and self.here is not None:
                self.shared.far.send_operation_failed(lane, 0, error(), onwards=True)

    def break_off(self, key_id: int, error: Callable[[], BaseException]) -> None:
        """Fail the messages of a group or a lane that have not met their other end here."""
        for lane in list(self.lanes.values()):
            if key_id in (lane.group_id, lane.id):
                for message in self._under_way(lane):
                    message.fail(Failure(error(), seen=True))
        for name in list(self.queues):
            self._search_soon(name)

    def rank_left(self, rank: int) -> None:
        """Fail the messages that wait for a rank that has finished its program."""
        for lane in list(self.lanes.values()):
            for message in self._under_way(lane):
                if lane.members[not message.receives] == rank:
                    self._fail_if_left(lane, message, rank)
        for name in list(self.queues):
            self._search_soon(name)

    @staticmethod
    def _under_way(lane: Lane) -> list[Message[Any]]:
        """Return the messages of a lane that wait for their other end, or move over a wire."""
        if not lane.by_wire:
            return [message for message in lane.arrived if message is not None]
        return [line[0] for line in lane.lines if line and line[0].request is not None]

    def _all_left(self, queue: Queue) -> bool:
        """Whether all other ranks have finished their programs, and no message of them is in flight."""
        others = [(src, rank) for src, rank in enumerate(queue.group.ranks) if src != queue.name[1]]
        if not others or not self.shared.left.issuperset(rank for _, rank in others):
            return False
        for src, rank in others:
            name = *queue.name, src
            lane, (_, numbers) = self.lanes.get(name), self.numbers.get(name, ((), (0, 0)))
            if (lane is None or lane.by_wire) and not self.shared.sent_no_more(rank, lane_id(*name), numbers[1]):
                return False
        return True

    def issued_counts(self, rank: int) -> dict[int, int]:
        """Return the number of messages of a rank here at its end of each lane, by id of the lane."""
        lanes = self.numbers.items()
        return {lane_id(*name): numbers[rank == ends[1]] for name, (ends, numbers) in lanes if rank in ends}

    def _fail_if_left(self, lane: Lane, message: Message[Any], rank: int) -> None:
        """Fail a message if the other end has finished its program, and never issued its own."""
        if rank not in self.shared.left or not self.shared.sent_no_more(rank, lane.id, message.seq):
            return
        if message.context.rank in self.shared.closing and not message.receives:  # both close: nobody has failed
            message.drop()
        else:
            needs = f"rank {message.context.rank} needs it in {message.label} ({message.call_site})"
            message.fail(Failure(RankLeftError(f"rank {rank} finished its program while {needs}", culprit=rank)))

    def close_group(self, group_id: int) -> None:
        """Drop the messages of a group that no rank here uses any more; the numbers of its lanes are kept."""
        of_inbox: list[dict[Any, Any]] = [self.lanes, self.queues]
        for messages in of_inbox:
            for name in [name for name in messages if name[0] == group_id]:
                del messages[name]
