"""Jobs that run now: which there are, and what their ranks do. It costs a job nothing: its flight records are read."""

# The map of this room, in the order data flows:
#
#   worlds    which worlds run on this host, from the records of their processes
#   figures   what each rank did in the last moments: compute, communication hidden and exposed, bytes, who is late
#   screen    that as lines of a terminal
