"""Matching: the messages between two processes as a state machine without sockets, tasks or time."""

# The map of this folder, in the order in which to read it:
#
#   protocol   the kinds of messages, the limits, and the error for a breach of the rules
#   ends       one end of a message: a send or a receive, and its result
#   outgoing   messages that leave for the other process, most urgent first, within its credit
#   incoming   messages that arrive from it, in order, within a budget, and the receives that wait
#   engine     both halves: one for every other process
#
# A transport passes to an engine the calls of its ranks (`Outgoing.queue_announcement`, `Engine.receive`,
# `Engine.withdraw`) and arrived messages (`Engine.handle`, `Incoming.handle_eager`, `Incoming.chunk_memory`,
# `Incoming.count_chunk`), and takes messages to send (`Outgoing.next_message`, `Outgoing.next_chunk`). Nothing waits
# here. `transports.matched` is the asynchronous shell.

from transports.matching.ends import Lane, Receive, Send
from transports.matching.engine import Engine
from transports.matching.outgoing import Chunk
from transports.matching.protocol import Limits, Message, MessageKind, ProtocolError

__all__ = [
    "Chunk",
    "Engine",
    "Lane",
    "Limits",
    "Message",
    "MessageKind",
    "ProtocolError",
    "Receive",
    "Send",
]
