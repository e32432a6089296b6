"""Jobs that run now: which there are, and what their ranks do. Their flight records say it."""

# The map of this room, in the order data flows:
#
#   look      one look at a world after another
#   worlds    which worlds run on this host, from the records of their processes
#   glimpse   what a process says of its ranks to those who look on from elsewhere
#   figures   what each rank did in the last moments: compute, communication hidden and exposed, bytes, who is late
#   screen    that as lines of a terminal
