"""Launcher: starts the processes of a world, shows their output, ends them together, and names the culprit."""

# Files:
#
#   restarts     starts a world again that has failed
#   jobs         a pure machine: what follows from the reports and ends of the processes of one launch
#   launcher     starts them, and performs its actions
#   binding      the cores that each keeps to;  lifeline: why none outlives its launcher
#   output       what they print, in whole lines
#   verdict      which one is at fault, or whether memory ran out;  report: errors of programs and commands on stderr
