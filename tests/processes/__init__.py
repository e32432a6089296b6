"""Several processes as tasks of one, in virtual time, with everything that can go wrong between them decided by a seed.

The code is the real one, from the sockets up: rendezvous, membership, control plane, worlds. `net` is the network that
it finds when it asks Trio for sockets, `simulation` the time, the order of tasks, and what happens to processes.
"""
