"""The launcher: it starts the processes of a world, shows what they print, ends them together, and says who failed."""

# The map of this room:
#
#   spec         what to start
#   restarts     starts a world again that has failed
#   processes    all of one launch, to their end;  nodeprocess: one of them
#   lifeline     why none outlives its launcher
#   output       what they print;  lines: in whole lines
#   status       what a process tells its launcher: that it waits for others, and why it ends
#   verdict      which one is at fault;  memory: whether the kernel is
