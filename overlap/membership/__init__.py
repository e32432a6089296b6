"""Who is in a world of several processes, what they say to each other, and how the loss of one is noticed."""

# From the top down:
#
#   handle              Membership: what a member can ask of the others;  gathering: bytes of any size
#   inbox               what it hears
#   coordinator         what member 0 does with what it hears
#   lookout             lets watchers look on, who are no members
#   control_link        one connection to it: queues, and silence
#   control_messages    what is said on it;  control_frames: how that is written
#   clock_offset        how far this process's clock is from member 0's
#
# Members are not ranks: a process may host several. It knows nothing of how connections come about: see `rendezvous`.

from .clock_offset import ClockOffset
from .control_link import OutboxFullError, Patience
from .handle import MemberLostError, Membership
from .inbox import InboxFullError, Lost, News

__all__ = [
    "ClockOffset",
    "InboxFullError",
    "Lost",
    "MemberLostError",
    "Membership",
    "News",
    "OutboxFullError",
    "Patience",
]
