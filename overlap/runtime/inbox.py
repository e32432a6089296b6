"""Inbox of a process: the messages that its ranks send and receive, while they are under way.

A lane has the messages of one sender for one receiver with one tag on one group. It is strict FIFO at both of its ends:
only the first send and the first receive of it are under way. Inside a process they match here, when both have arrived;
between processes a wire matches them. Messages take no room in the window of a stream, because their order differs
between ranks. Receives from any source wait in a queue, and choose among the lanes of their receiver, tag and group.
Lanes and queues without messages are removed at once.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from transports import LinkLostError, TransportError

from ..collectives.reduce import Array
from ..errors import RankLeftError
from . import transfer
from .failure import Failure
from .lane import RECEIVE, RETURNED_NS, SEND, Lane, LaneName, Queue, QueueName, lane_id, wire_tag
from .match import RankCall, gave_up_error_maker, mismatch_error_maker, peer_error_maker
from .message import ARRIVALS, Message, Returned
from .state import ADMITTED, DONE, ISSUED, MATCHING, RUNNING
from .stream import start_queued_operation

if TYPE_CHECKING:
    from transports import Envelope

    from .communicators import Communicators

# Most idle lanes whose numbers of messages are kept. Beyond, all are dropped, and begin at 0: a program may use each
# tag only once.
_MOST_IDLE_LANES = 1 << 16


class Inbox:
    """Messages of the ranks of one process ("here"), in lanes and queues.

    Args:
        shared: The communicators of the world, which have its state.

    Attributes:
        shared: The same.
        here: World ranks of this process; None: all.
        lanes: Lanes with messages, by name.
        queues: Queues of receives from any source, by name.
        numbers: For each lane, by name: (world ranks of sender and receiver, [number of the next send, number of the
            next receive]). A lane without messages is dropped if its two numbers are equal and it matches here.
        arrive: Called with a message that is the first of its lane: matches it, unless an interceptor holds it.
    """

    shared: Communicators
    here: frozenset[int] | None
    variant = ""  # as of communicators: reports name the peers of a message, not its group

    def __init__(self, shared: Communicators) -> None:
        self.shared, self._engine, self.here = shared, shared.engine, shared.local
        self.lanes: dict[LaneName, Lane] = {}
        self.queues: dict[QueueName, Queue] = {}
        self.numbers: dict[LaneName, tuple[tuple[int, ...], list[int]]] = {}
        self.arrive: Callable[[Message[Any]], None] = self.match

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def enqueue(self, message: Message[Any]) -> bool:
        """Put a message at the end of its lane, and number it. Return whether it is the first there.

        A receive from any source goes into its queue instead; it gets a number once it has chosen a sender.
        """
        group_id, peer, end, own = message.messages.group_id, message.peer, message.receives, message.member.rank
        lane: Any
        if peer is None:
            queue_name = QueueName(group_id, own, message.tag)
            lane = self.queues.get(queue_name)
            if lane is None:
                lane = self.queues[queue_name] = Queue(queue_name, message.member.key)
            line = lane.receives
        else:
            # see `LaneName`: the receiver comes before the tag, the sender after it
            name = (group_id, own, message.tag, peer) if end else (group_id, peer, message.tag, own)
            lane = self.lanes.get(name) or self.open_lane(name, message)
            line = lane.messages[end]
            message.seq = lane.numbers[end]
            lane.numbers[end] += 1
        message.lane = lane
        line.append(message)
        return line[0] is message

    def open_lane(self, name: LaneName, message: Message[Any]) -> Lane:
        """Make and return the lane of a message that has a peer. It continues the kept numbers of a lane of that name.

        If the numbers of too many idle lanes are kept, all are dropped, and `shared.has_lost_counts` is set.
        """
        wires, peer, members = message.messages.wires, cast("int", message.peer), message.members
        lane = self.lanes[name] = Lane()
        lane.name, lane.src, lane.members, lane.group = name, name[3], members, message.member.key
        lane.queue = name[:3]  # type: ignore[assignment]  # equal to a `QueueName`, which takes longer to make
        lane.by_wire = (wires[peer] if peer in wires else message.messages.wire(peer)) is not None
        lane.messages, lane.arrived, lane.returned = (deque(), deque()), [None, None], []
        numbers = self.numbers.get(name)
        if numbers is None:
            if len(self.numbers) >= _MOST_IDLE_LANES + len(self.lanes):
                self.numbers = {each: self.numbers[each] for each in self.lanes if each in self.numbers}
                self.shared.has_lost_counts = True
            numbers = self.numbers[name] = members, [0, 0]
        lane.numbers = numbers[1]
        return lane

    def remove_message(self, message: Message[Any], failure: Failure | None, *, frees_number: bool = False) -> None:
        """Remove a message from its lane or queue, because it has ended or is withdrawn, and let the next one arrive.

        Args:
            message: The message.
            failure: Failure of the message; None: it has not failed.
            frees_number: Whether the message is a withdrawn receive whose number goes to the next one.
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
        # take it out of its lane or queue
        if isinstance(lane, Lane):
            queue_name, end = lane.queue, message.receives
            line = lane.messages[end]
            if lane.arrived[end] is message:
                lane.arrived[end] = None
            if frees_number:  # later receives move up: of numbers 4, 5, 6 without 4 remain 4, 5
                lane.numbers[RECEIVE] -= 1
                for later in line:
                    if later.seq > message.seq:
                        later.seq -= 1
        else:
            queue = cast("Queue", lane)
            queue_name, line = queue.name, queue.receives
            if queue.searching is message:
                queue.searching = None
                self._cancel_announcement_wait(queue)
        # let the next one arrive, and drop what is empty
        if line[0] is message:
            line.popleft()
            if line:
                line[0]._enter(ADMITTED)
                message.context.call_in_turn(partial(start_queued_operation, line[0]))
        else:
            line.remove(message)
        if not isinstance(lane, Lane):
            if not line:
                self.queues.pop(queue_name, None)
        elif not (lane.messages[SEND] or lane.messages[RECEIVE] or lane.returned):
            self.lanes.pop(lane.name, None)
            if lane.numbers[SEND] == lane.numbers[RECEIVE] and not lane.by_wire:  # equal numbers may begin at 0 again
                self.numbers.pop(lane.name, None)
        if self.queues and message.receives:
            self._search_soon(queue_name)

    # -- matching ------------------------------------------------------------------------------------------------------

    def match(self, message: Message[Any]) -> None:
        """Match a message, the first of its lane, whose input exists; if its other end has not arrived, it waits.

        A receive from any source begins to choose a sender. A message to or from another process begins its transfer.
        """
        lane, shared, receives = message.lane, self.shared, message.receives
        if not isinstance(lane, Lane):
            self._begin_search(message, cast("Queue", lane))
            return
        if receives and lane.returned:
            self._take_returned_message(lane, message)
            return
        if shared.broken_errors and (
            broken := shared.broken_errors.get(lane.group_id) or shared.broken_errors.get(lane.id)
        ):
            message.fail(Failure(broken()))
            return
        if lane.by_wire:
            if shared.finished_ranks or shared.early_reports:
                self._fail_if_peer_ended(lane, message)
            if message.state is MATCHING:
                message.messages.begin_transfer(message)
            return
        other_end = SEND if receives else RECEIVE
        other = lane.arrived[other_end]
        if other is None:
            self._wait_for_other_end(message, lane)
            return
        lane.arrived[other_end] = None
        send, receive = (other, message) if receives else (message, other)
        if send.call is receive.call or receive.agrees(send.call, send.flat):
            try:
                self._engine.carry_message(lane, send, receive, send.call)
            except Exception as unfit:  # no memory, or ranks that no wire of the model joins
                self._fail_both_ends(send, receive, unfit)
        else:
            self._fail_mismatched_ends(lane, send, receive)

    def _wait_for_other_end(self, message: Message[Any], lane: Lane) -> None:
        """Lock the arrays of a message, and let it wait for its other end in this process."""
        shared = self.shared
        lane.arrived[message.receives] = message
        if not message.receives or message.buffers is not None or message.locked or message.out is None:
            message.lock_arrays()
        elif not message.context.arrays.shapes_only:  # inlined from `lock_arrays`, for a short latency
            out = message.out
            message.target, message.locked = out.view(), message.context.locks.lock((out,), out)
        if shared.finished_ranks and message.peer_rank in shared.finished_ranks:
            self._fail_if_peer_left(lane, message, message.peer_rank)
        elif self.queues and not message.receives:
            self._search_soon(lane.queue)

    def _fail_if_peer_ended(self, lane: Lane, message: Message[Any]) -> None:
        """Fail a message if its peer, in another process, has finished its program or reported a failure of it."""
        self._fail_if_peer_left(lane, message, message.peer_rank)
        for error in self.shared.take_early_reports(lane, message.seq):
            message.fail(Failure(error()))  # type: ignore[operator]  # for a message the reports are errors alone

    @staticmethod
    def _fail_both_ends(send: Message[Any], receive: Message[Any], error: BaseException) -> None:
        """Fail the receive with `error`, and the send because of it: their match cannot be carried out."""
        peers_error = peer_error_maker(receive, error)
        receive.fail(Failure(error))
        send.fail(Failure(peers_error()))

    @staticmethod
    def _fail_mismatched_ends(lane: Lane, send: Message[Any], receive: Message[Any]) -> None:
        """Fail both ends of a match in this process, because their calls differ."""
        src, dst = lane.members
        error = mismatch_error_maker(
            send.member.name,
            receive.seq,
            RankCall(dst, receive.call, receive.call_site),
            RankCall(src, send.call, send.call_site),
        )
        send.fail(Failure(error()))
        receive.fail(Failure(error()))

    def fail_and_report(self, message: Message[Any], failure: Failure) -> None:
        """Fail a message that cannot take part, such as one whose input has failed, and report that to its other end.

        * The other end is in another process: the failure is reported there.
        * Both are here, and the message is a send: the error takes its place in the lane, for the receive to meet.
        * Both are here, and the message is a receive: its send waits for the next receive.
        """
        lane, seq, failed = message.lane, message.seq, peer_error_maker(message, failure.error)
        message.fail(failure)
        if not isinstance(lane, Lane):
            return
        if self.here is None or message.peer_rank in self.here:
            if not message.receives:
                self.put_back_message(lane, Returned(next(ARRIVALS), error=failed))
        else:
            self.shared.control.send_operation_failed(lane, seq, failed())

    def fail_broken_wire(self, message: Message[Any], error: BaseException) -> None:
        """Fail a message whose wire broke with `error`; if a report of the cause may be on its way, a moment later.

        A receive that has left its lane or queue by then does not fail.
        """
        if isinstance(error, TransportError):
            error.operation = f"{message.label} ({message.call_site})"
        lane = message.lane

        def fail() -> None:
            if message.lane is lane:
                self.fail_and_report(message, Failure(error))

        if self.here is None or not isinstance(error, LinkLostError) or error.evident:
            fail()
        else:
            self.shared.control.delay_wire_failure(message, error, fail)

    def fail_message(self, lane_id: int, seq: int, error: Callable[[], BaseException]) -> bool:
        """Fail a message because its other end, in another process, has failed.

        Args:
            lane_id: Id of the message's lane.
            seq: Number of the message in the lane.
            error: Makes the error of the message.

        Returns:
            Whether the message is in its lane; False if it has not been issued yet, or has ended.
        """
        for lane in self.lanes.values():
            if lane.by_wire and lane.id == lane_id:
                for message in (*lane.messages[SEND], *lane.messages[RECEIVE]):
                    if message.seq == seq:
                        message.fail(Failure(error()))
                        return True
        return False

    # -- messages that are given back ------------------------------------------------------------------------------

    def withdraw_receive(self, receive: Message[Any], later: Callable[[], None]) -> bool | None:
        """Return whether a receive may leave its lane: no message has met it. Only the caller removes it there.

        The receive of a transfer is withdrawn from the wire.

        Args:
            receive: The receive, which has arrived.
            later: Called once the wire has withdrawn the receive, if that happens after this call.

        Returns:
            True: it may leave. False: a message has met it. None: the wire decides later.
        """
        if self.shared.intercept is not None and self.shared.intercept.withdraw_held_receive(receive):
            return True
        if receive.request is not None:
            return transfer.withdraw_transfer(receive, later)
        lane = receive.lane
        # without a transfer, it has met no message if it still waits in its lane, or searches in its queue
        return (lane.arrived[RECEIVE] if isinstance(lane, Lane) else cast("Queue", lane).searching) is receive

    def give_to_next_receive(self, receive: Message[Any], message: Returned) -> None:
        """Give the message of an ended receive to the next receive of its lane; make the lane again if need be."""
        name = receive.messages.lane_name(receive)
        self.put_back_message(self.lanes.get(name) or self.open_lane(name, receive), message)

    def put_back_message(self, lane: Lane, message: Returned, giver: Message[Any] | None = None) -> None:
        """Put a message that no task has taken back into its lane, and give it to the next receive that waits there.

        Args:
            lane: The lane.
            message: The message. Of several, the one that arrived first is received first.
            giver: The receive that returns the message, if it is still in the lane: it must not get the message again.
        """
        lane = self.lanes.setdefault(lane.name, lane)
        insort(lane.returned, message, key=lambda returned: returned.arrival_number)
        waiting = lane.messages[RECEIVE][0] if lane.messages[RECEIVE] else None
        if waiting is None or waiting is giver or waiting.state <= ADMITTED:
            self._search_soon(lane.queue)
        elif lane.arrived[RECEIVE] is waiting:
            lane.arrived[RECEIVE] = None
            self._take_returned_message(lane, waiting)
        # it waits on a wire: withdraw it there, so that it arrives again, at once (True) or by `_match_again` later
        elif waiting.state is RUNNING and transfer.withdraw_transfer(waiting, partial(self._match_again, waiting)):
            self.arrive(waiting)

    def _match_again(self, receive: Message[Any]) -> None:
        """Match a receive again, after the wire has withdrawn it, so that it gets a returned message."""
        if not receive.done:
            self.arrive(receive)

    def _take_returned_message(self, lane: Lane, receive: Message[Any]) -> None:
        """End a receive with the oldest returned message of its lane.

        It fails if its call does not fit that message, or if that message is the error of a failed send.
        """
        message = lane.returned.pop(0)
        receive.arrival_number = message.arrival_number
        try:
            if message.error is not None:
                raise message.error()
            pattern = message.call
            assert pattern is not None, "this is a bug in overlap: a returned message has no call"
            lane.numbers[RECEIVE] -= 1  # the number belongs to a later message
            if not receive.agrees(pattern, message.flat):
                src, dst = lane.members
                raise mismatch_error_maker(
                    receive.member.name,
                    receive.seq,
                    RankCall(src, pattern, "received before"),
                    RankCall(dst, receive.call, receive.call_site),
                )()
            receive.prepare_result(pattern)
            if message.data is not None:
                cast(Array, receive.target).reshape(-1)[...] = message.data
        except Exception as error:  # no memory, or another call
            receive.fail(Failure(error))
            return
        receive.finish(receive.context.now_ns(), receive.describe_meeting(pattern, receive.started_ns))

    # -- receives from any source ------------------------------------------------------------------------------------

    def has_message(self, receive: Message[Any]) -> bool:
        """Whether a message is present that a parked receive would meet at once."""
        if receive.given_peer is None and receive.messages.queue_name(receive) in self.queues:
            return False
        return self._find_oldest_message(receive, self._remote_senders(receive)) is not None

    def _lanes_of(self, receive: Message[Any]) -> list[Lane]:
        """Return the lanes from which a receive may take a message: one, or for any source those of all senders."""
        name, asked = receive.messages.queue_name(receive), receive.given_peer
        senders = range(receive.member.size) if asked is None else (asked,)
        return [lane for src in senders if (lane := self.lanes.get((*name, src))) is not None]

    def _begin_search(self, receive: Message[Any], queue: Queue) -> None:
        """Let a receive from any source, the first of its queue, choose a sender now or soon."""
        receive.lock_arrays()
        queue.searching = receive
        if receive.moves_at_once:
            self._search_for_message(queue)
        else:
            self._search_soon(queue.name)

    def _search_soon(self, name: QueueName) -> None:
        """Let the first receive of a queue search when the engine lets it choose; see `choose_message_soon`."""
        queue = self.queues.get(name)
        if queue is not None and queue.searching is not None:
            self._engine.choose_message_soon(queue.searching.context, partial(self._search_for_message, queue))

    def _search_for_message(self, queue: Queue, arrived: Envelope | None = None) -> None:
        """Let the first receive of a queue take the oldest message; without one it waits, or fails if none can come.

        `arrived` is a message that another process has announced just now; None: the engine is asked for one.
        """
        receive = queue.searching
        if receive is None:
            return
        self._cancel_announcement_wait(queue)
        if (broken := self.shared.broken_errors.get(queue.name.group_id)) is not None:
            receive.fail(Failure(broken(), seen=True))
            return
        choices = self._remote_senders(receive)
        oldest = self._find_oldest_message(receive, choices, arrived)
        if oldest is not None:
            _, sender = oldest
            self._move_to_lane(receive, sender, queue.group.ranks[sender])
        elif self._have_all_senders_left(queue):
            rank = receive.context.rank
            cause = f"all other ranks finished their programs while rank {rank} waits in {receive.label}"
            receive.fail(Failure(RankLeftError(f"{cause} ({receive.call_site})", culprit=rank)))
        elif choices:
            queue.scope = trio.CancelScope()
            receive.context.spawn(self._search_after_announcement, queue, receive, choices, queue.scope)

    def _move_to_lane(self, receive: Message[Any], sender: int, rank: int) -> None:
        """Move the first receive of a queue to the lane of the sender that it has chosen.

        `sender` is the group rank of the sender, and `rank` its world rank.
        """
        receive.context.flight.record_end(receive.record, receive.context.now_ns())
        self.remove_message(receive, None)
        receive.priority -= receive.port.stream.priority  # `begin` adds it again
        receive._enter(ISSUED)
        receive.peer, receive.peer_rank, receive.members = sender, rank, (rank, receive.context.rank)
        receive.messages.begin(receive)

    def _remote_senders(self, receive: Message[Any]) -> list[tuple[int, int]]:
        """Return the possible senders of a receive in other processes, as (world rank, tag on the wire).

        A sender that another receive names does not count: its next message is for that receive.
        """
        messages, asked = receive.messages, receive.given_peer
        if not messages.has_wires:
            return []
        named = {lane.src for lane in self._lanes_of(receive) if lane.messages[RECEIVE]}
        tag = wire_tag(messages.lane_name(receive))
        return [
            (rank, tag)
            for src, rank in enumerate(receive.member.label[1])
            if src not in named and asked in (None, src) and messages.wire(src) is not None
        ]

    def _find_oldest_message(
        self, receive: Message[Any], choices: list[tuple[int, int]], arrived: Envelope | None = None
    ) -> tuple[int, int] | None:
        """Return (start time in ns, group rank of the sender) of the oldest message for a receive, or None.

        Of messages with equal start times, the one of the lowest rank counts as the oldest. `choices` is the result of
        `_remote_senders`; for `arrived` see `_search_for_message`.
        """
        offered = [(lane.oldest_available_ns, lane.src) for lane in self._lanes_of(receive)]
        if choices:
            announced = arrived or self._engine.oldest_announced_message(receive.context.rank, choices)
            if announced is not None and (announced.src, announced.tag) in choices:
                offered.append((announced.since_ns, receive.member.label[1].index(announced.src)))
            if self.shared.early_reports:
                offered += [(RETURNED_NS, src) for src in self._failed_senders(receive, choices)]
        return min([(since_ns, src) for since_ns, src in offered if since_ns is not None], default=None)

    def _failed_senders(self, receive: Message[Any], choices: list[tuple[int, int]]) -> Iterator[int]:
        """Yield the group ranks of the senders in `choices` that have reported that their next send has failed."""
        queue_name, early = receive.messages.queue_name(receive), self.shared.early_reports
        for rank, _ in choices:
            name: LaneName = (*queue_name, receive.member.label[1].index(rank))
            _, numbers = self.numbers.get(name, ((), [0, 0]))
            if (name[0], lane_id(*name), numbers[RECEIVE]) in early:
                yield name[3]

    @staticmethod
    def _cancel_announcement_wait(queue: Queue) -> None:
        if queue.scope is not None:
            queue.scope.cancel()
            queue.scope = None

    async def _search_after_announcement(
        self, queue: Queue, receive: Message[Any], choices: list[tuple[int, int]], scope: trio.CancelScope
    ) -> None:
        """Wait for an announcement of another process, then search again; a lost wire fails the receive.

        `choices` is the result of `_remote_senders`. `scope` is cancelled when the receive needs no announcement any
        more.
        """
        with scope:
            try:
                arrived = await self._engine.wait_for_announced_message(receive.context.rank, choices)
            except Exception as error:  # the wire to a sender is lost
                if receive is queue.searching:  # else it has a message already, or was cancelled
                    self.fail_broken_wire(receive, error)
                return
            # The search goes through the engine's queue of choices, as the first one did: so the next receive chooses
            # only after this one has begun to take its message.
            self._engine.choose_message_soon(receive.context, partial(self._search_for_message, queue, arrived))

    def forget_operation(self, seq: int) -> None:
        """Do nothing, unlike a communicator: a message leaves its lane when it ends."""

    # -- ends of ranks and groups ------------------------------------------------------------------------------------

    def give_up_waiting(self, message: Message[Any], failure: Failure) -> None:
        """Fail a message that its rank waits for no longer, and all present and later ones of its lane.

        They fail because nobody knows how far the other end is. Of a flat message (for PyTorch) the lane lives on.
        """
        lane, error = message.lane, gave_up_error_maker(message, failure.error)
        message.fail(failure)
        if isinstance(lane, Lane) and not message.flat:
            self.shared.fail_operations_of(lane.id, error)
            if lane.by_wire and self.here is not None:
                self.shared.control.send_operation_failed(lane, 0, error(), onwards=True)

    def fail_messages_of(self, key_id: int, error: Callable[[], BaseException]) -> None:
        """Fail the messages of a group or a lane that have not met their other end here.

        Args:
            key_id: Id of the group or of the lane.
            error: Makes a new error for each message. The errors count as seen: unawaited, they do not fail a rank.
        """
        for lane in list(self.lanes.values()):
            if key_id in (lane.group_id, lane.id):
                for message in self._messages_under_way(lane):
                    message.fail(Failure(error(), seen=True))
        self.search_again()

    def search_again(self) -> None:
        """Let the first receive from any source of each queue look again for a message, or for an error."""
        for name in list(self.queues):
            self._search_soon(name)

    def on_rank_left(self, rank: int) -> None:
        """Fail the messages that wait for a rank that has finished its program."""
        for lane in list(self.lanes.values()):
            for message in self._messages_under_way(lane):
                if message.peer_rank == rank:
                    self._fail_if_peer_left(lane, message, rank)
        self.search_again()

    @staticmethod
    def _messages_under_way(lane: Lane) -> list[Message[Any]]:
        """Return the messages of a lane that wait for their other end, or move over a wire."""
        if not lane.by_wire:
            return [message for message in lane.arrived if message is not None]
        return [line[0] for line in lane.messages if line and line[0].request is not None]

    def _have_all_senders_left(self, queue: Queue) -> bool:
        """Whether no message can come any more: all other ranks have finished, and nothing of them is in flight."""
        others = [(src, rank) for src, rank in enumerate(queue.group.ranks) if src != queue.name.receiver]
        if not others or not self.shared.finished_ranks.issuperset(rank for _, rank in others):
            return False
        for src, rank in others:
            name: LaneName = (*queue.name, src)
            # A lane without numbers never had a message. Messages that match here are visible in their lane. On a wire,
            # only the numbers of both ends show whether all were received.
            lane, (_, numbers) = self.lanes.get(name), self.numbers.get(name, ((), (0, 0)))
            if (lane is None or lane.by_wire) and not self.shared.has_issued_at_most(
                rank, lane_id(*name), numbers[RECEIVE]
            ):
                return False
        return True

    def issued_counts(self, rank: int) -> dict[int, int]:
        """Return how many messages a rank here has issued on each lane, by id of the lane: sends, or receives.

        A receive from any source that has chosen no sender counts on the lane of each possible sender.
        """
        for queue_name, queue in self.queues.items():
            ranks = queue.group.ranks
            # make an entry for the lane of each possible sender, so that the loop below counts it
            for src, sender in enumerate(ranks):
                self.numbers.setdefault((*queue_name, src), ((sender, ranks[queue_name.receiver]), [0, 0]))
        counts: dict[int, int] = {}
        for name, (ends, numbers) in self.numbers.items():  # `ends` are sender and receiver
            if rank in ends:
                end = int(rank == ends[RECEIVE])
                undecided = self.queues.get(name[:3]) if end == RECEIVE else None  # type: ignore[call-overload]
                counts[lane_id(*name)] = numbers[end] + (len(undecided.receives) if undecided else 0)
        return counts

    def is_unwanted(self, send: Message[Any]) -> bool:
        """Whether nobody will receive a send: its receiver has left, or closes and has issued no receive for it."""
        receiver, lane, shared = send.members[1], cast("Lane", send.lane), self.shared
        if receiver in shared.finished_ranks or receiver not in shared.closing_ranks:
            return receiver in shared.finished_ranks
        is_awaited_here = lane.messages[RECEIVE] or lane.queue in self.queues
        return not is_awaited_here and shared.has_issued_at_most(receiver, lane.id, send.seq)

    def _fail_if_peer_left(self, lane: Lane, message: Message[Any], rank: int) -> None:
        """Fail a message if its peer, the world rank `rank`, has finished its program without issuing the other end.

        But a send whose own rank is closing (it waits only until its messages are received) ends as if received.
        """
        if rank not in self.shared.finished_ranks or not self.shared.has_issued_at_most(rank, lane.id, message.seq):
            return
        if message.context.rank in self.shared.closing_ranks and not message.receives:  # both close: nobody has failed
            message.end_unreceived()
        else:
            needs = f"rank {message.context.rank} needs it in {message.label} ({message.call_site})"
            message.fail(Failure(RankLeftError(f"rank {rank} finished its program while {needs}", culprit=rank)))

    def close_group(self, group_id: int) -> None:
        """Drop the lanes and queues of a group that no rank here uses any more; the numbers of its lanes are kept."""
        self.lanes = {name: lane for name, lane in self.lanes.items() if name[0] != group_id}
        self.queues = {name: queue for name, queue in self.queues.items() if name[0] != group_id}
