"""SharedMemory: a transport between processes of one host."""

# The map of this folder, in the order in which to read it:
#
#   transport    SharedMemory itself, and its factory
#   joining      the processes of this host: handshake, passing of memory, and a trial of reading it
#   memory_link  the link to another process: messages under way, loss, goodbye
#   board        the rows in which the ranks of a group match operations, and memory on loan to them
#   engine       compiled code that carries messages and collectives (native/), and its events in the event loop
#   memory_limit the memory of the machine or the container
#   segment      memory that several processes map, and the loans of its pieces
#   peer_memory  the system call that reads another process's memory

from transports.shared_memory.transport import SharedMemory, factory

__all__ = ["SharedMemory", "factory"]
