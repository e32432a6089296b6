"""Causes of slow steps: every nanosecond of a step of a rank has one cause, and the largest loss has a place.

In the order data flows: `rank` measures one profile (`windows`, `host`, `places` are its parts), in a process of its
own; `ranks` matches the collectives of several; `advice` and `report` judge; `page` and `against` show.
`recorded` says the same of timelines that we recorded: `verdict` is their sentence, `reasons` says which
rank or operation exposed communication, `stragglers` which ranks were late, `oddities` which spans cannot be true.
`folder` finds the files of a job, and `children` reads large ones.
"""
