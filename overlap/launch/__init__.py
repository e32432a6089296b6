"""How processes start, find each other, and stay in touch."""

# The map of this room. Finding each other, in the order in which it happens:
#
#   invitation   what a process must know to join
#   rendezvous   join(): the one way in; host (member 0) and visitor (everybody else) are its two halves
#   sockets      endpoints, listening, dialling
#   door         whom the host lets in
#   links        one control connection: queues, and silence
#   messages     what is said on it
#   hub          what the host does with it
#   membership   what a member can ask of the others; inbox: what it hears
#   clocks       how far this process's clock is from member 0's
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
