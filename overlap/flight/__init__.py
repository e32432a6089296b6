"""The flight recorder: the last operations of every rank, always on, readable when no process is left to ask."""

# The map of this room:
#
#   layout      places and sizes of the parts of a record: pure
#   recorder    writes it, on the path of every operation
#   folder      where records lie, which of them stay, and for how long
#   reading     reads a record, and refuses other files
#   autopsy     the verdict in three lines, the table of ranks, and the last signs of one process
