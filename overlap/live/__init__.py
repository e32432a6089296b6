"""Jobs that run now, and the work of their ranks, from their flight records."""

# In the order data flows:
#
#   worlds    the worlds that run on this host, and snapshots of a world one after the other
#   figures   the last moments of each rank: compute, communication hidden and exposed, bytes, which rank is late
#   screen    figures as lines of a terminal
