"""Prices of collectives on a machine.

`overlap plan` asks for a price here, and so does every call of a simulated world. One file a level, from above:

============  ==========================================================================================
`choice`      plan of a call in a world: remembered by size class and group
`select`      plan of a collective: the cheapest option, the others, and the reason
`candidates`  options of a collective on a group, before the number of bytes is known: `flat`,
              `composed` (inside nodes and between them), `shortcut` (shared memory)
`option`      price of an option: the best number of slices (`pipeline`), and waits at a fabric (`levels`)
`phase`       time of a phase: the clocks' time, or its busiest wire, memory or processor, if that is longer
`clocks`      time at which every rank finishes, by max-plus arithmetic
`placed`      time of each message of a round on the wires of a `placement`, with `processors` that ranks share
`rounds`      messages of each step of a table; `regular`: of algorithms that need no table
`parameters`  overheads and efficiencies of the machine's file
============  ==========================================================================================

The other files: `geometry` and `symmetry` of groups (a few ranks represent all in a price), `measurements` (published
rows), and `remembered` (a cache).
"""
