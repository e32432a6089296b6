"""What a world stands on: its cluster and its wires, the other processes, and their common trace."""

# The map of this room:
#
#   world_setup     alone() and among(): everything that run() opens around a world
#   one_life        a world from its beginning to what is kept of it;  keeper: writes its timeline
#   connecting      from a place among several processes to a transport and the control plane
#   shared_trace    one trace file of all processes
