"""Efa: sockets between processes, several to each, as one transport."""

# The map of this room, in the order in which to read it; `transports.frame` has the form of what travels and
# `transports.matching` its meaning:
#
#   transport    Efa itself, and how it is made
#   joining      dialling, letting in and shaking hands, until every two processes are connected
#   door         the sockets that listen
#   queueing     how much of what leaves waits in the system
#   sharing      which rail takes what
#   returning    how rails that have died come back
#   address      what a process tells the others about where it can be reached
#   link         another process: its rails, and what becomes of its messages when rails die or it leaves
#   departures   what leaves for it as frames, on whichever rail has room
#   connection   the two kinds of rail: bare sockets and encrypted streams
#   rail         one connection: frames in and out, and which of them have arrived

from transports.efa.transport import Efa, factory

__all__ = ["Efa", "factory"]
