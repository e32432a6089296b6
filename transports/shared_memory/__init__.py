"""SharedMemory: processes of one host that read each other's memory, as one transport."""

# The map of this room, in the order in which to read it:
#
#   transport    SharedMemory itself, and how it is made
#   joining      who is on this host, shaking hands, passing memory, and trying whether it can be read
#   segment      memory that several processes map, and that goes with the last of them
#   board        where the ranks of a group say how far they have come;  heap: what of a segment is lent
#   shelf        what is lent to all ranks of a group together, until the last has dropped it
#   watchman     wakes those who wait for ranks elsewhere, and looks a moment before it sleeps
#   word         what threads sleep on who wait in its place
#   peer_memory  reading another process's memory where it lies
#   link         another process: packets that say what is to be read, and reading it
#   packets      the form of what is said
#   slots        memory through which long messages go where processes may not read each other's

from transports.shared_memory.transport import SharedMemory, factory

__all__ = ["SharedMemory", "factory"]
