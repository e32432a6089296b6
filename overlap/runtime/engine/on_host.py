"""One rank's end of a collective between processes of one host: it arrives, reads its pulls, and says how far it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from math import prod
from threading import get_ident
from typing import NamedTuple, cast

import numpy as np

from transports import LinkLostError
from transports.common import PAYLOAD_BYTES, Place

from ...collectives.call import Call
from ...collectives.kinds import BROADCAST, SCATTER, Collective
from ...collectives.reduce import Array
from ..handover import Handover
from ..match import Match
from ..operation import Operation
from .host_bytes import Sources, address_of, bytes_of, do_all, room_for, typed
from .meeting import DONE, BoardRun, Meeting, Mode
from .pulls import Pull, collected, gives, needed, pulls, reduced, rings, takers, unread
from .workers import INLINE_BYTES

_CORES = os.cpu_count() or 1
# How far a rank has come: its input can be read; its slice is reduced; it reads no input any more.
_ARRIVED, _SLICED, _DONE = 1, 2, DONE
#: Inputs up to here are copied into mapped memory rather than read where they are. Measured on 2 and 4 processes: at
#: 1 MiB copying takes 0.06 to 0.09 ms (2) and 0.35 to 1.2 (4), reading 0.12 to 0.14 and 0.7 to 1.1; at 4 MiB 1.8
#: against 0.96 (2).
COPIED_BYTES = 1 << 20
# Says that a result is at an address of its owner's, not at a place in what all map.
_PRIVATE = 1 << 63
# From here each of three or more ranks reduces a slice only: one meeting more, and less to read.
_SLICED_BYTES = 64 << 10
# What a thread does at once: two pieces, and what is read, stay in a second-level cache of 2 MiB. Measured on 64 MiB, 2
# and 4 processes: 17.5 and 61.7 ms with 1 MiB, 16.4 and 62.6 with 512 KiB, 18.8 and 59.0 with 256.
_PIECE_BYTES = 512 << 10


class Posted(NamedTuple):
    """The place of data that a rank has posted: of its input, or of its slice of the result."""

    where: int  # An offset, an address, or a length; see `mode`
    mode: int  # A `Mode`: what `where` counts in


class Stage(NamedTuple):
    """The part of an operation between two meetings: what a rank takes from the others at one go."""

    pulls: Sequence[Pull]
    slicing: bool  # Whether these make the slice of the result that this rank reduces for all
    phase: int  # How far the rank has come afterwards
    waits: bool  # Whether it waits then until all have come as far


class HostRun(BoardRun):
    """One rank's end of an operation under way. It is the operation's `scope`, too: what is cancelled ends here."""

    __slots__ = (
        "_board", "_call", "_cancelled", "_given", "_home", "_in_place", "_lent", "_match", "_needed", "_number",
        "_over", "_phase", "_place", "_position", "_private", "_source", "_stages", "_tag", "_target", "_watched",
        "_working",
    )  # fmt: skip

    _source: Array | None
    _target: Array | None
    _given: list[Posted]

    def __init__(self, meeting: Meeting, match: Match, operation: Operation) -> None:
        self._meeting, self._match, self._operation = meeting, match, operation
        self._board = meeting.board
        self._call = cast("Call", match.pattern)
        self._position, self._number = operation.port.position, operation.seq
        self._tag = meeting.communicator.tag(self._call, operation.seq)
        self._phase = 0
        self._needed = needed(self._call, self._position)
        self._place: Place | None = None
        self._working = self._watched = self._over = self._cancelled = False
        self._stages: list[Stage] = []
        self._in_place = self._lent = self._private = False
        self._home = 0

    # -- arriving -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Arrive, as soon as the board is there, and go on as far as the others have come."""
        operation = self._operation
        operation.moves(self)
        operation.look = self.look_before_sleeping
        if self._board.ready:
            self._begin()
        else:
            self._board.open(self._position, self._begin)

    def _begin(self) -> None:
        """Post where the input is, as soon as a row is free, and go on."""
        board, number, tag = self._board, self._number, self._tag
        if self._over:
            return
        if not board.usable:
            self._fall_back()
            return
        if not (board.lost or self._meeting.free(self._operation)):
            self._operation.context.spawn(self._meeting.until_free, self._operation, self._begin)
            return
        try:
            where, mode = self._give()
            self._phase = _ARRIVED
            if mode != Mode.ON_BOARD and not board.reads and self._call.kind not in (BROADCAST, SCATTER):
                self._needed = None  # another one may be homeless
            payload = bytes_of(cast("Array", self._source)) if mode == Mode.ON_BOARD else None
            board.arrive(self._position, number, tag, where=where, mode=mode, payload=payload, result=self._home)
            if rings(self._call, self._position) or board.reached(number, tag, _ARRIVED):
                board.ring()
        except Exception as error:
            self._end(error)
            return
        self._go_on()

    def _give(self) -> Posted:
        """Put the input where the others can read it, and return where."""
        operation, call = self._operation, self._call
        operation.fit(call)
        source, target = operation.source, operation.target
        self._source = None if source is None else source.reshape(-1)
        self._target = None if target is None else target.reshape(-1)
        self._in_place = source is not None and target is not None and np.may_share_memory(source, target)
        if self._source is None or not self._source.size or not gives(call, self._position):
            return Posted(0, Mode.NOWHERE)
        return self._offer(self._source)

    def _offer(self, source: Array) -> Posted:
        """Put the input on the board or in mapped memory, or leave it where it is, by its length."""
        board, target, nbytes = self._board, self._target, source.nbytes
        if nbytes <= PAYLOAD_BYTES:
            return Posted(nbytes, Mode.ON_BOARD)
        if nbytes > COPIED_BYTES:
            # where all find it, if they will find this rank's slice of the result, too
            if board.reads or target is None or board.place_of(address_of(target), target.nbytes) is not None:
                where = board.place_of(address_of(source), nbytes)
                if where is not None:
                    return Posted(where, Mode.COMMON)
            if board.reads:
                return Posted(address_of(source), Mode.PRIVATE)
        self._place = place = self._meeting.lend(nbytes)
        if place is None:
            return Posted(address_of(source), Mode.PRIVATE if board.reads else Mode.HOMELESS)
        self._lay(bytes_of(source), place.view)
        return Posted(place.where, Mode.MAPPED)

    def _lay(self, source: memoryview, view: memoryview) -> None:
        """Copy the input to where the others can read it, but for a part that nobody else reads."""
        start, stop = unread(self._call, self._position)
        if self._sliced(private=False):
            own = reduced(self._call, self._position)
            start, stop = own.start, own.start + own.size
        if start == stop:
            view[:] = source
            return
        itemsize = source.nbytes // prod(self._call.shape or (1,))
        first, last = start * itemsize, stop * itemsize
        view[:first] = source[:first]
        view[last:] = source[last:]

    # -- going on -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Go on, if the others have come as far."""
        if self.waits:
            self._go_on()

    @property
    def waits(self) -> bool:
        """Whether it has said something, and nobody works on what follows."""
        return self._phase > 0 and not (self._working or self._over)

    @property
    def others_came(self) -> bool:
        """Whether it waits for the others, and they have come as far, or one of them never will."""
        return self.waits and (self._reached() or self._board.lost is not None)

    def _reached(self) -> bool:
        """Whether those have come as far whom this rank needs: to read their inputs, or to have its own read."""
        if self._phase > _ARRIVED or self._needed is None:
            return self._board.reached(self._number, self._tag, self._phase)
        return all(self._board.has_come(other, self._number, self._tag) for other in self._needed)

    def _go_on(self) -> None:
        """Take what the others have posted, stage by stage, as far as they have come; else wait for them."""
        board, everybody = self._board, range(self._call.size)
        while not (self._working or self._over):
            if not self._reached():
                if board.lost is not None:
                    self._end(LinkLostError(board.lost))
                elif not self._watched:
                    self._watched = True
                    board.waiting.watch(self)
                return
            if self._phase == _ARRIVED:
                self._given = [Posted(*board.posted(other, self._number)) for other in everybody]
                if self._needed is None:
                    self._meeting.met(self._number)
                modes = {self._given[other].mode for other in (everybody if self._needed is None else self._needed)}
                modes.add(self._given[self._position].mode)
                if Mode.HOMELESS in modes:
                    board.advance(self._position, self._number, self._tag, _DONE)
                    self._fall_back()
                    return
                self._plan(modes)
            elif self._phase == _SLICED:
                self._given = [_found(board.result(other, self._number)) for other in everybody]
            if self._stages:
                self._take_all(self._stages[0])
            else:
                self._end(None)

    def _plan(self, modes: set[int]) -> None:
        """Plan what is left to do: all have come who are needed."""
        call = self._call
        private = not modes.isdisjoint((Mode.PRIVATE, Mode.COMMON))
        self._lent, self._private = Mode.MAPPED in modes, private
        if self._sliced(private=private):
            self._stages = [
                Stage([reduced(call, self._position)], slicing=True, phase=_SLICED, waits=True),
                Stage(collected(call), slicing=False, phase=_DONE, waits=private),
            ]
        else:
            waits = private and gives(call, self._position)
            self._stages = [Stage(pulls(call, self._position), slicing=False, phase=_DONE, waits=waits)]

    def _sliced(self, *, private: bool) -> bool:
        """Whether each rank reduces a slice only, and then takes those of the others."""
        if self._call.kind is not Collective.ALL_REDUCE or self._call.shared:
            return False
        return private or (self._call.size > 2 and self._call.nbytes >= _SLICED_BYTES)

    def _take_all(self, stage: Stage) -> None:
        """Take what a stage takes: here, or in worker threads if it is much."""
        workers, ranks = self._meeting.common.workers, self._call.size
        target = self._slice_target() if stage.slicing else self._target
        here = self._call.work_bytes * (2 if stage.slicing or ranks > 2 else ranks) <= INLINE_BYTES
        cut = (pull for whole in stage.pulls for pull in ([whole] if here else self._cut(whole)) if pull.size)
        work = [partial(self._take, pull, cast("Array", target)) for pull in cut if not self._is_there(pull)]
        if work and not here:
            self._working = True
            workers.submit(work, self._worked_there, priority=self._operation.urgency)
            return
        try:
            workers.quiet.run(do_all, work)
        except Exception as error:
            self._end(error)
        else:
            self._stepped()

    def _is_there(self, pull: Pull) -> bool:
        """Whether a pull takes this rank's own input, which lies in the result already."""
        own = self._in_place and self._phase < _SLICED and not self._call.shared
        return own and pull.sources == ((self._position, pull.start),)

    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Look, and do some of the workers' pieces, where so few ranks have any that cores are idle."""
        workers, call = self._meeting.common.workers, self._call
        super().look_here(handover, longest_s)
        while self._working and 2 * takers(call) <= _CORES and workers.help():
            if not self._working:
                super().look_here(handover, longest_s)

    def _worked_there(self, error: BaseException | None) -> None:
        """Go on in the thread that did the last piece, if the loop sleeps: it need not be woken for every step."""
        handover = self._operation.context.handover
        if error is not None or not handover.in_place(partial(self._worked, None), False):
            self._meeting.common.token.run_sync_soon(self._worked, error)

    def _worked(self, error: BaseException | None) -> bool:
        if self._cancelled and get_ident() != self._operation.context.thread:
            self._meeting.common.token.run_sync_soon(self._worked, error)
            return True
        self._working = False
        if self._cancelled:
            self.cancel()
        elif error is not None:
            self._end(error)
        else:
            self._stepped()
            self._go_on()
        return True

    def _stepped(self) -> None:
        """Say how far this rank has come; without a need to wait, the operation is over."""
        _, slicing, phase, waits = self._stages.pop(0)
        if waits or self._lent or self._private:
            result = self._result() if slicing else 0
            self._board.advance(self._position, self._number, self._tag, phase, result=result)
        if waits:
            self._phase = phase
        if (waits or self._private) and self._board.reached(self._number, self._tag, phase):
            self._board.ring()
        if not waits:
            self._end(None)

    def _result(self) -> int:
        """Return where the others find this rank's slice."""
        if self._place is not None:
            return self._place.where
        assert self._target is not None, "every rank gets the result"
        address = address_of(self._target)
        where = self._board.place_of(address, self._target.nbytes)
        return address | _PRIVATE if where is None else where

    # -- taking -------------------------------------------------------------------------------------------------------

    def _slice_target(self) -> Array | None:
        """Return where this rank's slice is reduced: where the others can read it."""
        if self._place is None:
            return self._target
        assert self._source is not None, "every rank gives something to an all-reduce"
        return typed(self._place.view, self._source.dtype)

    def _cut(self, pull: Pull) -> list[Pull]:
        """Cut what is taken into what a thread does at once."""
        assert self._target is not None, "who takes something has a place for it"
        most = max(1, _PIECE_BYTES // self._target.itemsize)
        return [
            Pull(pull.start + at, min(most, pull.size - at), tuple((who, start + at) for who, start in pull.sources))
            for at in range(0, pull.size, most)
        ]

    def _take(self, pull: Pull, target: Array) -> None:
        """Fold or copy one piece into the result."""
        part = target[pull.start : pull.start + pull.size]
        reducer = self._call.reducer
        if len(pull.sources) == 1 or reducer is None:
            self._copy(pull.sources[0], part)
            return
        mine = self._position
        # One of the first two may as well be read to where their sum belongs, which saves a quarter of the time (64 MiB
        # on 2 processes).
        in_place = self._in_place and target is self._target
        there = (0 if mine else 1) if reducer.plain and not in_place else -1
        sources = Sources(
            [
                partial(self._read, who, start, part, bytes_of(part) if index == there else min(index, 1))
                for index, (who, start) in enumerate(pull.sources)
            ]
        )
        if in_place and mine > 1:  # `fold` would write to it before it is read
            total = typed(room_for(2, part.nbytes), part.dtype)
            reducer.fold(sources, total)
            part[...] = total
        else:
            reducer.fold(sources, part)

    def _copy(self, source: tuple[int, int], part: Array) -> None:
        who, start = source
        where, mode = self._given[who]
        mine, collecting = who == self._position, self._phase == _SLICED
        if mine and (self._place is None if collecting else self._in_place):  # it is there
            return
        if mode == Mode.PRIVATE and not mine:
            self._board.read(who, where + start * part.itemsize, bytes_of(part))
            return
        np.copyto(part, self._read(who, start, part, 0, collecting=collecting))

    def _read(self, who: int, start: int, like: Array, room: memoryview | int, *, collecting: bool = False) -> Array:
        """Return a piece of what a rank gives; what has to be read is read to a room, or to one with a number."""
        if who == self._position and not collecting:
            assert self._source is not None, "what is taken is given"
            return self._source[start : start + like.size]
        where, mode = self._given[who]
        offset, nbytes = start * like.itemsize, like.nbytes
        if mode in (Mode.MAPPED, Mode.COMMON):
            return typed(self._board.mapped(who, where + offset, nbytes), like.dtype)
        if mode == Mode.ON_BOARD:
            return typed(self._board.payload(who, self._number, where)[offset : offset + nbytes], like.dtype)
        if isinstance(room, int):
            room = room_for(room, nbytes)
        self._board.read(who, where + offset, room)
        return typed(room, like.dtype)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _fall_back(self) -> None:
        """Let a program do it, which takes tasks."""
        if get_ident() != self._operation.context.thread:
            self._working = True  # until then
            self._operation.context.from_thread(self._fall_back)
            return
        self._close()
        self._operation.scope = None
        communicator = self._meeting.communicator
        if not self._operation.done:
            plan = self._meeting.common.program(communicator, self._call, self._operation)
            communicator.start_end(self._match, self._operation, plan)

    def _end(self, error: BaseException | None) -> None:
        if self._operation.heard and get_ident() != self._operation.context.thread:
            self._working = True  # until then
            self._operation.context.from_thread(self._end, error)
            return
        if error is None:
            self._board.end(self._position, self._number, self._tag)
        self._close()
        self._operation.stopped()
        self._meeting.communicator.settle(self._match, self._operation, error)

    def cancel(self) -> None:
        """End, once nothing of this rank's is touched any more."""
        self._cancelled = True
        if not (self._working or self._over):
            self._close()
            self._operation.stopped()
            self._meeting.communicator.ended(self._match, self._operation)

    def _close(self) -> None:
        self._over = True
        if self._watched:
            self._board.waiting.unwatch(self)
        if self._place is not None:
            self._meeting.keep(self._number, self._tag, self._place)


def _found(result: int) -> Posted:
    """Return where a rank's slice is."""
    return Posted(result & ~_PRIVATE, Mode.PRIVATE) if result & _PRIVATE else Posted(result, Mode.MAPPED)
