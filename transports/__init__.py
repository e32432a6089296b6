"""Moving bytes between ranks: one contract, several fabrics, wrappers that pace, damage and record."""

# The map of this folder, in the order in which to read it:
#
#   base         the contract of transports;  wire: the contract of one rank's end, and its awaiting calls;
#                request: a send or receive under way
#   signature    what a message is: fingerprints that are compared where messages meet receives, and texts for errors
#   failures     the errors of transports;  buffers: memory, as flat bytes, on loan, or for bounces
#   factory      factories of transports: their argument, and their names, built in or of other packages
#   neuronlink   ranks of one process, in memory, zero-copy
#   matching     the protocol of messages between two processes: eager, rendezvous, credits. No sockets, no tasks
#   matched      transports of several processes: a link to each of the others, and the asynchronous shell around
#                matching, so that a transport only has to move bytes
#   frame        the form of this protocol on a socket, and checks against hostile bytes
#   handshake    the proof that two processes belong together;  identity: the introduction of a process;
#                address: its addresses;  tls: encryption;  meeting: listening, dialling, and admission
#   tcp          options of sockets, and the state of connections that the kernel reports
#   efa          sockets between processes, several to each
#   shared_memory  processes of one host: compiled code, which matches by itself
#   nearest      shared memory inside a host, sockets beyond
#   patience     how long to poll before sleeping, and how to leave a core that others need
#   router       several transports as one: each rank by the first that reaches it
#   wrappers     base classes of wrappers, messages that are begun later, and Recording, which records sends
#   guarded      checks of wires of other packages while a program runs
#   paced        emulates latency and bandwidth; its wires are plans, not tasks
#   faulty       drops, delays, corrupts and cuts, by seed
#   testing      the contract suite, for our transports and for anybody's (imported on its own)
#
# Nothing here knows a collective, a group or a topology.

from importlib import import_module
from typing import TYPE_CHECKING
from warnings import warn

from transports.base import Transport
from transports.buffers import Buffer, Delivery
from transports.failures import (
    ArgumentError,
    LengthMismatchError,
    LinkLostError,
    SignatureMismatchError,
    TransportClosedError,
    TransportError,
)
from transports.faulty import Faulty, InjectedFault
from transports.neuronlink import NeuronLink
from transports.paced import LinkSpeed, Paced, by_kind
from transports.request import Request
from transports.router import Router
from transports.signature import PlainSignature, Signature
from transports.wire import OPEN, Envelope, Wire
from transports.wrappers import Recording, Sent

if TYPE_CHECKING:
    from transports.efa import Efa
    from transports.shared_memory import SharedMemory
    from transports.tls import Tls

__all__ = [
    "OPEN",
    "ArgumentError",
    "Buffer",
    "Delivery",
    "Efa",
    "Envelope",
    "Faulty",
    "InjectedFault",
    "LengthMismatchError",
    "LinkLostError",
    "LinkSpeed",
    "NeuronLink",
    "Paced",
    "PlainSignature",
    "Recording",
    "Request",
    "Router",
    "Sent",
    "SharedMemory",
    "Signature",
    "SignatureMismatchError",
    "Tls",
    "Transport",
    "TransportClosedError",
    "TransportError",
    "Wire",
    "by_kind",
]

# One process needs no sockets: transports between processes are imported on first use.
_HOMES = {
    "Efa": "transports.efa",
    "SharedMemory": "transports.shared_memory",
    "Tls": "transports.tls",
}

_RENAMED: dict[str, type] = {"Call": Request, "Fault": InjectedFault}


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        successor = _RENAMED[name]
        text = f"transports.{name} is now {successor.__name__}; the old name goes with the next version"
        warn(text, DeprecationWarning, 2)
        return successor
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
