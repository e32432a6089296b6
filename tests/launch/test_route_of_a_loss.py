"""The files through which the loss of a process goes, from its connection to the error that its peers await."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import interpreters

ROOT = Path(__file__).parents[2]

ROUTE = {
    "processes/link.py",  # the connection ends, at member 0
    "processes/members.py",  # which decides that this is a loss, and sends it to the others
    "processes/join.py",  # the program's loop
    "processes/control.py",  # makes the error
    "runtime/world.py",  # ends the ranks here
    "runtime/ending.py",
    "runtime/operation.py",  # which await the error
}
BESIDE = {
    "processes/wire.py": "frames",
    "processes/connect.py": "wires to the lost process",
    "processes/status.py": "record for the launcher",
    "runtime/failure.py": "the error",
    "runtime/outstanding.py": "operations under way",
    "diagnostics.py": "text",
    "errors.py": "text",
}
PROGRAM = """
import json, os, signal, sys, threading
import numpy as np
import trio

found, tracing = set(), []

def is_loss(value):
    names = ("MemberLost", "PeerLostError", "PeerFailedError")
    if isinstance(value, list):
        return any(map(is_loss, value))
    text = isinstance(value, str) and value.startswith("its connection ")
    return text or any(type(each).__name__ in names for each in (value, getattr(value, "message", None)))

def trace(frame, event, _):
    code = frame.f_code
    if tracing and event == "call" and code.co_filename.startswith(sys.argv[1]):
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_loss(frame.f_locals.get(name)) for name in names):
            found.add(os.path.relpath(code.co_filename, sys.argv[1]))

threading.setprofile(trace)
sys.setprofile(trace)
import overlap

async def main(rank):
    await rank.barrier()
    if rank.rank == 2:
        await trio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    pending = rank.all_reduce(np.ones(3))
    tracing.append(True)
    try:
        await pending
    finally:
        tracing.clear()
        print(json.dumps(sorted(found)), flush=True)

overlap.run(main)
"""


def test_a_lost_process_passes_seven_files(tmp_path: Path) -> None:
    """Functions are counted that get the loss, its reason or its error as an argument, on all survivors together."""
    (tmp_path / "lost.py").write_text(PROGRAM)
    arguments = ("-m", "overlap", "run", "--no-prefix", "--processes", "3", "lost.py", str(ROOT / "overlap"))
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = interpreters.run(*arguments, cwd=tmp_path, env=environ, timeout=120)
    routes = [set(json.loads(line)) for line in ended.stdout.splitlines()]
    assert len(routes) == 2, ended.stderr
    assert set().union(*routes) - BESIDE.keys() == ROUTE
