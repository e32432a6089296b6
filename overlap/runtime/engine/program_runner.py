"""Runs operations as programs: each rank's part of a compiled collective, run on a CC-core of that rank."""

from __future__ import annotations

from contextvars import copy_context

import numpy as np

from transports import Transport

from ...collectives.call import Call
from ...collectives.kinds import P2P
from ..communicator import Communicator
from ..match import Match
from ..operation import Operation
from .compiler import Compiler
from .wire_driven import Station
from .wire_ways import DrivenWay, MessageWay, TaskWay, WireWay, end
from .workers import Workers


class ProgramRunner:
    """Runs operations whose bytes must travel over a transport, each rank's part beside what the rank computes."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler) -> None:
        self._transport, self._workers, self._compiler = transport, workers, compiler
        self._stations: dict[tuple[int, ...], Station | None] = {}  # by a rank and the members
        # An infinite gradient is the program's business, not a warning of ours; `np.errstate` takes longer each time.
        self._quiet = copy_context()
        self._quiet.run(np.seterr, all="ignore")

    def start(self, communicator: Communicator, match: Match, *, lasting: bool) -> None:
        """Start the programs of all ranks that are ready and not under way.

        Args:
            communicator: Where they meet.
            match: Their ends; it is known what travels.
            lasting: Whether the same calls are to be carried out in this way from now on.
        """
        for operation in match.arrived:
            if operation is not None and not (operation.running or operation.done):
                self._start(communicator, match, operation, lasting=lasting)

    def _start(self, communicator: Communicator, match: Match, operation: Operation, *, lasting: bool) -> None:
        call = match.pattern
        assert call is not None, "it is known what travels"
        try:
            way = self._way(communicator, call, operation.port.position)
        except Exception as error:
            end(communicator, match, operation, error)
            return
        if lasting and call is operation.call and not call.counts:  # those are seldom the same twice
            communicator.shorten(call, way)
        way.start(match, operation)

    def _way(self, communicator: Communicator, call: Call, position: int) -> WireWay:
        """Return how one rank's ends of a call are carried out."""
        members = communicator.members
        station = self._station(members, position)
        if call.kind is P2P and station is not None and station.starters:
            ((peer, starter),) = station.starters.items()
            return MessageWay(communicator, call, peer, starter)
        compiled = self._compiler.compile(call, members, position)
        if station is not None:
            return DrivenWay(communicator, call, compiled, station)
        endpoint, shares = self._transport.endpoint(members[position]), self._transport.shares_memory(members)
        return TaskWay(communicator, call, compiled, endpoint, self._workers, fans_out=not shares)

    def _station(self, members: tuple[int, ...], position: int) -> Station | None:
        """Return what starts messages to the other members without a task, if that is so for all of them."""
        key = (members[position], *members)
        if key not in self._stations:
            endpoint = self._transport.endpoint(members[position])
            found = {peer: endpoint.starter(peer) for peer in members if peer != members[position]}
            known = {peer: starter for peer, starter in found.items() if starter is not None}
            station = Station(starters=known, workers=self._workers, quiet=self._quiet)
            self._stations[key] = station if len(known) == len(found) else None
        return self._stations[key]
