"""`python -m tests.benchmarks`: the speeds that this project aims at, measured, and compared with other software."""

# In the order in which to read it:
#
#   __main__    the command: what it takes, and all that it measures
#   figures     a line of the table: a figure and its aim
#   contests    all-reduces on our ranks, and on those of gloo and MPI
#   sockets     every collective between processes, and gloo's
#   results     all-reduces that make their results, against those that are given arrays for them
#   costs       what the library itself costs:  issuing, starting, schedules measure that
#   simulation  virtual time, and SimPy's
#   truth       how far a simulation is from the program that it simulates
#   two_hosts   training between two emulated hosts, and PyTorch's
#
# How a time is taken, and the operations themselves, are those of `overlap bench`.
