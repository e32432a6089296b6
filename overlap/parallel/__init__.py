"""Training strategies on the public API of ranks, streams and futures: each short enough to read and to copy.

`schedules/` holds pipeline schedules as data.
"""
