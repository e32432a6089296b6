"""Mpi: the same contract over an MPI library, whose launcher starts the processes and whose fabric moves the bytes."""

# The map of this room, from the bottom up; `transports.matching` says what headers mean:
#
#   library    mpi4py, imported when it is first needed
#   header     what processes tell each other ahead of bytes: pure
#   wire       what is asked of MPI: headers into a ring, pieces from array to array
#   link       another process: its engine's words as headers, large messages in pieces; never waits
#   polling    how often to look for what has come
#   transport  Mpi: how it opens, looks and closes
#   bootstrap  all-gather of a few bytes before any transport is open

from transports.mpi.bootstrap import exchange, introduce
from transports.mpi.transport import Mpi, factory

__all__ = ["Mpi", "exchange", "factory", "introduce"]
