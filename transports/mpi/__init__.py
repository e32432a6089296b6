"""Mpi: a transport over an MPI library. Its launcher starts the processes, its fabric moves the bytes."""

# The map of this folder, from the bottom up; `transports.matching` has the meaning of headers:
#
#   bootstrap  the MPI library, and an all-gather of a few bytes before any transport is open
#   wire       the calls of MPI: headers into a ring, pieces from array to array
#   mpi_link   the link to another process: its engine's messages as headers, large messages in pieces; never waits
#   polling    the pauses between two polls of MPI
#   transport  Mpi: how it opens, looks and closes

from transports.mpi.bootstrap import exchange, introduce
from transports.mpi.transport import Mpi, factory

__all__ = ["Mpi", "exchange", "factory", "introduce"]
