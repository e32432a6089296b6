"""A world in a thread of its own, for programs that own their main thread: notebooks, servers, PyTorch, pytest."""

# The map of this room:
#
#   door          connect(): what it is asked to be, and whom it meets
#   connection    Connection: the handle, the thread behind it, and their end
#   meeting       from an endpoint or a store to where the processes meet
