"""How processes start, find each other, and stay in touch."""

# The map of this room. Finding each other, in the order in which it happens:
#
#   invitation   what a process must know to join
#   rendezvous   join(): the one way in; host (member 0) and visitor (everybody else) are its two halves
#   sockets      endpoints, listening, dialling
#   door         whom the host lets in
#   links        one control connection: queues, and silence
#   messages     what is said on it; frames: how it is written
#   hub          what the host does with it
#   membership   what a member can ask of the others; gathering: of many bytes; inbox: what it hears
#   clocks       how far this process's clock is from member 0's
#
# Being launched, by `overlap run` or by others:
#
#   environment  where this process stands; foreign: as other launchers say it; hostlist: as Slurm names machines
#   secret       what proves membership
#   joining      from there to a transport and neighbours; by_mpi: where MPI introduces the processes
#   traces       one trace file of all processes
#
# Launching:
#
#   processes    all of one launch, to their end; nodeprocess: one of them
#   lifeline     why none outlives its launcher
#   output       what they print; lines: in whole lines
#   status       what a process tells its launcher at its end
#   verdict      which one is at fault; memory: whether the kernel is
#
# Members (of a world of processes) are not ranks: a process may host several.

from .clocks import ClockOffset
from .inbox import InboxFullError, Lost, News
from .invitation import Invitation, JoinError
from .links import OutboxFullError, Patience
from .membership import MemberLostError, Membership
from .rendezvous import join
from .sockets import Endpoint, ListenError, format_endpoint, parse_endpoint

__all__ = [
    "ClockOffset",
    "Endpoint",
    "InboxFullError",
    "Invitation",
    "JoinError",
    "ListenError",
    "Lost",
    "MemberLostError",
    "Membership",
    "News",
    "OutboxFullError",
    "Patience",
    "format_endpoint",
    "join",
    "parse_endpoint",
]
