"""What happens on the wires between the processes of a run, with thousands of operations in flight too."""

import re
from pathlib import Path

import pytest

from overlap.timeline import read_trace
from tests import interpreters
from tests.interpreters import environment, launch

# -- what happens on the wires between the processes of a run, as its user gets to know it -----------------------------

# Breaks one of three connections, and goes on until what has taken its place was used.
RAILS = """
import gc
import numpy as np
import overlap
from transports.efa.rail import Rail

async def main(rank):
    x = np.ones(1_000_000, np.float32)
    link = next(one for one in gc.get_objects() if isinstance(one, Rail)).owner
    await rank.barrier()
    if rank.rank == 0:
        next(rail for rail in link.rails if rail.index == 1).die("pulled by the test")
    used = 0
    while not used:
        assert (await rank.all_reduce(x) == 2).all()
        mine = any(rail.index > 63 and rail.read_bytes > 100 for rail in link.rails)
        used = await rank.all_reduce(np.array(int(mine)), op="min")

if __name__ == "__main__":
    overlap.run(main, timeout_s=60)
"""

# Flips a bit of whatever long comes from a socket of the second process.
FLIPS = """
import numpy as np
import overlap
from transports.efa.reading import ReadBuffer

async def main(rank):
    x = np.ones(200_000, np.float32)
    await rank.all_reduce(x)
    if rank.rank == 1:
        came = ReadBuffer.handle_received
        def flipped(self, count):
            if count > 1000:
                self.read_target()[count // 2] ^= 4
            return came(self, count)
        ReadBuffer.handle_received = flipped
    await rank.all_reduce(x, name="gradients", algorithm="ring")

if __name__ == "__main__":
    overlap.run(main, timeout_s=60)
"""


@pytest.mark.slow
def test_the_timeline_shows_that_a_rail_was_lost_and_is_back(tmp_path: Path) -> None:
    run = launch(tmp_path, RAILS, "--processes", "2", "--rails", "3", "--trace", "run.json")
    assert run.returncode == 0, run.stderr
    wires = [span for span in read_trace(tmp_path / "run.json").spans if span.kind == "wires"]
    told = sorted((span.rank, re.sub(r"\d+\.\d s$", "N s", span.name)) for span in wires)
    assert told[:3] == [
        (0, "rail 1 to process 1 (rank 1) is back after N s"),
        (0, "rail 1 to process 1 (rank 1) was lost: pulled by the test"),
        (1, "rail 1 to process 0 (rank 0) is back after N s"),
    ]
    lost_there = "rail 1 to process 0 (rank 0) was lost: "  # the end of it, or the news by another rail, come first
    assert told[3:] in [[(1, lost_there + why)] for why in ("the connection ended", "the other side has lost it")]
    for rank in (0, 1):
        lost, back = (span for span in wires if span.rank == rank)
        assert lost.start_ns == lost.end_ns < back.start_ns
        assert "lost" in lost.name
    for span in wires:
        assert f"[process {span.rank}] overlap: {span.name}" in run.stderr
    drawn = timeline(tmp_path, "run.json")
    first_ns = read_trace(tmp_path / "run.json").spans[0].start_ns
    for span in wires:
        assert f"wires at {(span.start_ns - first_ns) / 1e9:.3f} s, rank {span.rank}: {span.name}\n" in drawn
    shown = [line for line in timeline(tmp_path, "run.json", "--rank", "1").splitlines() if line.startswith("wires at")]
    assert len(shown) == sum(span.rank == 1 for span in wires)


def timeline(folder: Path, *options: str) -> str:
    done = interpreters.run("-m", "overlap", "timeline", *options, cwd=folder, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_flipped_bit_names_the_operation_the_peer_and_the_place(tmp_path: Path) -> None:
    run = launch(tmp_path, FLIPS, "--processes", "2", "--checksums", OVERLAP_UNIX="0")
    assert run.returncode == 1
    what = (
        r"process 0 \(rank 0\) is lost: the last connection to it was lost: a bad frame: bytes 0 to 400000 of the "
        r"message from rank 0 to rank 1, tag \d+, came damaged: the bytes do not match their checksum; "
        "check the memory of this host"
    )
    assert re.search(rf"^\[process 1\] overlap: {what}$", run.stderr, re.MULTILINE)
    assert re.fullmatch(
        r"overlap: rank 1 failed at train.py:16: LinkLostError: message from rank 0 to rank 1 of gradients #1 on group "
        rf"'world' \(train.py:16\): {what}",
        run.stderr.splitlines()[-1],
    )


# -- jobs whose ranks issue thousands of operations before they await the first ----------------------------------------

PROGRAM = """
import numpy as np
import overlap

CALLS = {
    "reduce": lambda rank, x, i: rank.reduce(x, root=0),
    "all_reduce": lambda rank, x, i: rank.all_reduce(x),
    "barrier": lambda rank, x, i: rank.barrier(),
    "broadcast": lambda rank, x, i: rank.broadcast(x, root=0),
    "gather": lambda rank, x, i: rank.gather(x, root=i % 2),
}

async def main(rank):
    kind, elements = "KIND", ELEMENTS
    names = list(CALLS) if kind == "mixed" else [kind]
    x = np.ones(elements, np.float32)
    futures = [CALLS[names[i % len(names)]](rank, x, i) for i in range(3000)]
    for future in futures:
        await future

if __name__ == "__main__":
    overlap.run(main, timeout_s=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "elements", "transport"),
    [
        ("reduce", 1000, "shared_memory"),
        *(
            pytest.param(kind, elements, transport, marks=pytest.mark.slow)
            for kind in ("reduce", "all_reduce", "barrier", "broadcast", "gather", "mixed")
            for elements in (1, 1000)
            for transport in ("shared_memory", "efa")
            if (kind, elements, transport) != ("reduce", 1000, "shared_memory")
        ),
    ],
)
def test_three_thousand_in_flight(kind: str, elements: int, transport: str, tmp_path: Path) -> None:
    program = PROGRAM.replace("KIND", kind, 1).replace("ELEMENTS", str(elements))
    run = launch(tmp_path, program, "--processes", "2", "--transport", transport)
    assert run.returncode == 0, run.stderr
