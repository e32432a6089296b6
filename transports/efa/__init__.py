"""Efa: a transport over sockets between processes, several to each."""

# The map of this room, in the order in which to read it; `transports.frame` has the form of frames, and
# `transports.matching` their meaning:
#
#   transport    Efa itself, and its factory
#   joining      the connections to all other processes, made at a `transports.meeting`
#   address      the addresses by which a process can be reached
#   efa_link     the link to another process: its rails, and its messages when rails die or it leaves
#   departures   the frames that leave for it, on any rail that has room
#   rail         one connection: frames in and out, and which of them have arrived
#   connection   the two kinds of rail: bare sockets and encrypted streams
#   reading      frames that arrive on a rail
#   sharing      the share of each rail in what leaves
#   tcp          socket options, and the state that the kernel reports
#   reconnection dead rails that come back

from transports.efa.transport import Efa, factory

__all__ = ["Efa", "factory"]
