"""Spare: a process that waits, with all that it needs, until a world takes it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import trio

from ..errors import UsageError
from ..version import version
from .agreement import EpochWorld, State, member_state
from .witness import Witness

#: How often a spare looks whether a world takes it, and a world that lacks members for spares.
WAIT_S = 0.01
#: Modules that a process loads when it joins a world: a spare loads them while nobody waits for it.
_WIRES = (
    "overlap.processes.connect",
    "transports.efa.transport",
    "transports.shared_memory.transport",
    "encodings.idna",
)


async def wait_for_world(witness: Witness, member: int) -> EpochWorld | None:
    """Return the world that takes this spare, or has lost it since; None: the run has ended without it.

    Raises:
        UsageError: The members run another program, or another version of overlap.
    """
    for name in _WIRES:
        import_module(name)
    await until(witness.program)
    if (program := witness.program()) != (own := program_here()):
        raise UsageError(
            f"spare: process {member} runs {own}, the others {program}; it cannot join them; "
            "start it with the same program"
        )
    while True:
        witness.offer()
        record = witness.record()
        if member_state(member, None, record, reported=False) is not State.WAITS:
            return record
        if witness.has_finished(record.epoch):
            return None
        await trio.sleep(WAIT_S)


async def until(condition: Callable[[], object], every_s: float = WAIT_S) -> None:
    """Wait until a condition holds that other processes make true; it is checked every `every_s`."""
    while not condition():  # noqa: ASYNC110
        await trio.sleep(every_s)


def program_here() -> str:
    """Return the name of the program that runs here, with a digest of its text, and the version of overlap."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path and Path(path).is_file() else "no file"
    return f"{path or sys.argv[0]} ({digest}) with overlap {version()}"
