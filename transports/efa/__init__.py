"""Efa: sockets between processes, several to each, as one transport."""

# The map of this room, in the order in which to read it; `transports.frame` has what travels:
#
#   transport    Efa itself, and the endpoints of its ranks
#   joining      listening, dialling and shaking hands, until every two processes are connected
#   address      what a process tells the others about where it can be reached
#   peer         another process: what becomes of its messages when rails die or it leaves
#   outbound     what leaves for it, most urgent first
#   inbound      what comes from it, and the receives that wait
#   messages     one end of a message: a task, its bytes, how far it has come
#   rail         one connection: frames in and out, and which of them have arrived
#   connection   the two kinds of rail: bare sockets and encrypted streams
#   rooms        memory that is lent to receivers

from transports.efa.transport import Efa, factory

__all__ = ["Efa", "factory"]
