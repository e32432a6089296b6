"""The route of a lost process, from its connection to the error of its peers; process 0 hears of it last."""

import json
import os
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from overlap.processes.host import Host
from overlap.processes.identity import RendezvousConfig
from overlap.processes.link import ControlLink
from overlap.processes.wire import FrameReader, Join, MemberLost, Message, Ready
from tests import interpreters

# -- the files through which the loss of a process goes, from its connection to the error that its peers await ---------

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


# -- news of a loss: process 0, which passes them on, may end at them; so its own program hears of them last -----------

LOST = MemberLost(member=2, reason="its connection ended without a goodbye")
READY = Ready(process="")


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "never reads"])
def test_member_0_hears_of_a_loss_when_the_news_has_left_for_the_others(reads: bool) -> None:
    """A member that never reads holds the news up for a second, and no longer."""
    clock = MockClock()

    async def main() -> tuple[list[Message], list[Message], list[Message]]:
        here, there = lockstep_stream_pair()  # what is sent has left when the other side has read it
        link = ControlLink(here, limit_bytes=10_000)
        heard: list[Message] = []
        config = RendezvousConfig(job="", member=0, members=3, endpoint=("", 0), secret=b"-")
        host = Host(config, heard.append, lambda line: None)
        host.links |= {1: link, 2: ControlLink(here, limit_bytes=10_000)}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write)
            nursery.start_soon(host.deliver_to_member_0)
            for member in range(3):
                host.perform_actions(host.members.add_connection(member, ""))
                host.receive(member, Join(detail="", process=""))
            del host.links[2]
            host.perform_actions(host.members.end_link(2, LOST.reason))
            await wait_all_tasks_blocked()
            before = list(heard)
            reading = FrameReader()
            read: list[Message] = []
            while reads and LOST not in read:
                read += reading.feed(await there.receive_some(10_000))
            if not reads:
                clock.jump(1)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return before, read, heard

    before, read, heard = trio.run(main, clock=clock)
    assert LOST not in before
    assert heard[-1] == LOST
    assert READY in heard
    assert (LOST in read) == reads
