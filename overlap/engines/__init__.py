"""Worlds on engines that place processes: the parts that Ray and Dask share."""

# The map of this folder, in the order data flows:
#
#   job        the part of `run` that is the same on all engines
#   gang       GangSpec: a program and its settings, as every process of a gang is given them; MemberEnd: how one ended
#   member     one process of a gang: meets the others through a store, lives, and says how it ended
#   home       the folder of a gang on a machine, and the files in it as bytes
#   verdict    from the ends of all members to the first failure
#   attempts   attempts until one ends well, and the files that the driver brings home
#   progress   the step that an attempt has reached
#   demand     the wait for resources, with a report of missing ones
