"""`--vs`: the same operations through other libraries, which have a process for each rank."""

# In the order data flows:
#
#   contenders             which there are; starts their processes and reads what they measured
#   gloo_rank, mpi_rank    such a process: the operations in the library's own words
#   inside                 what all of them do there
