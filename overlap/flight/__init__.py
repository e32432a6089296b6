"""The flight recorder: the last operations of every rank, always on, readable when no process is left to ask."""

# The map of this room:
#
#   layout      places and sizes of the parts of a record: pure
#   recorder    writes it, on the path of every operation
#   folder      where records lie, which of them stay, and for how long
#   reading     reads a record, and refuses other files
#   records     the records of the run that is meant, of all in a folder
#   ends        records as views for `waits`, and the last signs of one process
#   dumps       reads dumps of PyTorch's flight recorder, as views for `waits`
#   pickles     reads pickles of plain data
