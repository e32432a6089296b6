"""SharedMemory: a transport between processes of one host that read each other's memory."""

# The map of this room, in the order in which to read it:
#
#   transport    SharedMemory itself, and its factory
#   joining      the processes of this host: handshake, passing of memory, and a trial of reading it
#   memory_link  the link to another process: packets that name a message, and reading it where it lies
#   slots        memory for long messages between processes that may not read each other's memory
#   board        the rows in which the ranks of a group meet, and what is lent to them
#   engine       compiled code that carries collectives, and messages of the threads that call: native/
#   memory_limit the memory of the machine or the container
#   waiting      looking for a moment, sleeping, and ringing sleepers
#   segment      memory that several processes map, and the pieces of it that are lent
#   peer_memory  the system calls: reading another process's memory, and sleeping on a shared word

from transports.shared_memory.transport import SharedMemory, factory

__all__ = ["SharedMemory", "factory"]
