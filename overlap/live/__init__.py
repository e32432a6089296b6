"""Jobs that run now: which there are, and what their ranks do. Their flight records say it."""

# The map of this room, in the order data flows:
#
#   worlds    the worlds that run on this host, and snapshots of a world one after the other
#   figures   the last moments of each rank: compute, communication hidden and exposed, bytes, which rank is late
#   screen    figures as lines of a terminal
