"""Causes of slow and stuck jobs: every nanosecond of a step of a rank has one cause, and the largest loss a call site.

`entry` has `overlap.why`, for timelines and the files of a job; `hang` judges dumps and flight records.
In the order data flows: `rank` measures one profile (`host` and `sites` are its parts), in a process of its own;
`ranks` matches the collectives of several ranks; `advice` and `judgement` judge; `report` is the result; `page` and
`against` show it, and `limits` tests it. `recorded` judges timelines; `oddities` finds spans that cannot be true.
"""
