"""SharedMemory: a transport between processes of one host."""

# The map of this room, in the order in which to read it:
#
#   transport    SharedMemory itself, and its factory
#   joining      the processes of this host: handshake, passing of memory, and a trial of reading it
#   messages     messages of ranks: endpoints, and messages that nobody has received
#   memory_link  the link to another process: its calls under way, its loss, its goodbye
#   board        the rows in which the ranks of a group meet, and what is lent to them
#   engine       compiled code that carries messages and collectives (native/), and its way to the event loop
#   memory_limit the memory of the machine or the container
#   segment      memory that several processes map, and the pieces of it that are lent
#   peer_memory  the system call that reads another process's memory

from transports.shared_memory.transport import SharedMemory, factory

__all__ = ["SharedMemory", "factory"]
