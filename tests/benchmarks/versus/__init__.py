"""`overlap bench` beside other libraries, and with a setting on and off: `python -m tests.benchmarks.versus --help`."""

# In the order data flows:
#
#   __main__               the command: comparisons, their tables and JSON
#   contenders             other libraries: starts their processes and reads their samples
#   gloo_rank, mpi_rank    one process of a library;  inside: the timed loop of both
#   assignment             rows that processes measure in turn
#   turns                  rows measured in turn on our processes and on those of libraries;  member: one of ours
#   comparison             one operation with a setting off and on, side by side
