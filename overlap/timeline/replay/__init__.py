"""Replays of recorded runs with something changed: a trace becomes a graph of work that runs on a clock of its own.

In the order data flows: `inference` makes a `graph` of a timeline, `changes` change it (`buckets`, `streams`, and
`machine`, which has algorithms and their prices; `transfers` measures and prices the wires), `simulation` runs it, and
`prediction` compares the result with the recorded run and gives advice. All of it is pure.

A replay keeps the machine. On another one, the program runs in virtual time again: `computes` gives its computes their
recorded times.
"""
