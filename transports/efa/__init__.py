"""Efa: a transport over sockets between processes, several to each."""

# The map of this folder, in the order in which to read it; `transports.frame` has the form of frames, and
# `transports.matching` their meaning:
#
#   transport    Efa itself, and its factory
#   joining      the connections to all other processes, made by a `transports.meeting`
#   efa_link     the link to another process: its rails, and its messages when rails die or it leaves
#   departures   the frames that leave for it, on any rail that has room
#   rail         one connection: frames in both directions, and their acknowledgement
#   reading      frames that arrive on a rail
#   sharing      the share of each rail in the frames that leave
#   reconnection replacement of dead rails

from transports.efa.transport import Efa, factory

__all__ = ["Efa", "factory"]
