"""How the processes of a world find each other and prove who they are."""

# What each process knows:
#
#   launcher_environment    where it stands, as its environment says;  other_launchers: torchrun, MPI, Slurm;  hostlist
#   secret                  what proves membership;  mpi_introduction: where only MPI can tell
#   configuration           all of it that is needed to join
#
# Joining, in the order in which it happens:
#
#   joining     join(): the one way in;  hosting (member 0) and client (everybody else) are its two halves
#   sockets     endpoints, listening, dialling
#   acceptor    whom member 0 lets in
#   watching    looking on as one who is no member
#
# What comes of it is a `membership.Membership`.

from .configuration import JoinError, RendezvousConfig
from .joining import join
from .sockets import Endpoint, ListenError, format_endpoint, parse_endpoint

__all__ = ["Endpoint", "JoinError", "ListenError", "RendezvousConfig", "format_endpoint", "join", "parse_endpoint"]
