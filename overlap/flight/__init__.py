"""The flight recorder: the last operations of every rank, always on, readable when nobody is left to ask."""

# The map of this room:
#
#   layout      where in the file what lies: pure
#   recorder    writes it, on the path of every operation
#   folder      where files lie, which of them stay, and for how long
#   reading     reads one back, and refuses what is none
#   waiting     who waits for whom, from the files of all processes: pure
#   autopsy     the verdict in three lines, and the table of ranks: pure
#   last_signs  what one process was doing that ended a moment ago, for its launcher
