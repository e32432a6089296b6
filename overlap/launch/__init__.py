"""Launcher: starts the processes of a world, shows their output, ends them together, and names the culprit."""

# Files:
#
#   restarts     starts a world again that has failed
#   processes    all of one launch, to their end;  nodeprocess: one of them, and the description of a launch
#   binding      the cores that each keeps to;  lifeline: why none outlives its launcher
#   output       what they print, in whole lines
#   verdict      which one is at fault, or whether memory ran out;  report: errors of programs and commands on stderr
