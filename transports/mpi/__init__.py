"""Mpi: the same contract over an MPI library, whose launcher starts the processes and whose fabric moves the bytes."""

# The map of this room, from the bottom up:
#
#   library    mpi4py, imported when it is first needed
#   header     what processes tell each other ahead of bytes: pure
#   wire       what is asked of MPI: headers into a ring, pieces from array to array
#   parcels    large messages in pieces, the most urgent first
#   waiting    suspended calls, announced messages, queues by (src, dst, tag)
#   peer       what is kept of another process
#   mailroom   matches the two and answers headers: never waits
#   pace       how often to look for what has come
#   transport  Mpi and its endpoints: the thin asynchronous shell
#   bootstrap  all-gather of a few bytes before any transport is open

from transports.mpi.bootstrap import exchange, introduce
from transports.mpi.transport import Mpi, factory

__all__ = ["Mpi", "exchange", "factory", "introduce"]
