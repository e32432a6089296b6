"""A world in a thread of its own, for programs that own their main thread: notebooks, servers, PyTorch, pytest."""

# The map of this folder:
#
#   connecting    connect(): its arguments, and its rendezvous
#   connection    Connection: the handle, the thread behind it, and their end
#   rendezvous    from an endpoint or a store to the place where the processes meet
