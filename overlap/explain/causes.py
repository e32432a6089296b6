"""Causes: the names of everything that a rank can spend time on, and their wording."""

from __future__ import annotations

COMPUTE, COMM, WAIT, WIRE, COPY = "compute", "communication", "waiting", "wire", "copy"
LAUNCH, SYNC, DATA, PYTHON, GC = "launch", "sync", "data", "python", "gc"
LOCK, FILES = "lock", "files"
ALLOCATOR, STARTUP, COMPILE, CAPTURE = "allocator", "startup", "compile", "capture"
QUEUE, EVENT, LOOP, UNKNOWN = "queue", "event", "loop", "unrecorded"

WORDING = {
    COMPUTE: "computing",
    COMM: "exposed communication (waiting or wire)",
    WAIT: "waiting for a late rank",
    WIRE: "exposed communication on the wire",
    COPY: "copies and sets of memory with nothing in parallel",
    LAUNCH: "the host launches too slowly",
    SYNC: "the host waited for the device, and so launches late",
    DATA: "the data loader",
    PYTHON: "Python between operators",
    GC: "garbage collection",
    LOCK: "waiting for a lock, or for another thread",
    FILES: "reading or writing files",
    ALLOCATOR: "allocation of device memory",
    STARTUP: "start-up of the device's library",
    COMPILE: "compiling",
    CAPTURE: "capture of a graph",
    QUEUE: "between kernels that were queued",
    EVENT: "waiting for an event of another stream",
    LOOP: "the program keeps the event loop",
    UNKNOWN: "nothing is recorded",
}
"""Causes, and their text on a page. `COMM` is communication that cannot be divided into `WAIT` and `WIRE`."""

OWN_WORDING = WORDING | {
    COPY: "copies and sets of memory",
    QUEUE: "queued: operations wait for others, and nothing runs",
    UNKNOWN: "idle: nothing runs, and nothing is queued",
}
"""The text for traces of overlap itself, which record everything that a rank does."""

NAMES = tuple(WORDING)
HOST = (LAUNCH, SYNC, DATA, PYTHON, GC, LOCK, FILES, ALLOCATOR, STARTUP, COMPILE, CAPTURE)
"""Causes of an idle device for which the host is to blame."""
