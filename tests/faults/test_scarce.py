"""What the system may withhold from a process: descriptors, threads, memory; and names that are no text."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap.threads import start_thread
from tests.interpreters import environment

from .job import LIMIT_S

PROGRAM = """
import numpy as np
import overlap

async def main(rank):
    for _ in range(5):
        found = await rank.all_reduce(np.ones(100_000))
    return float(found[0])

print(overlap.run(main, timeout_s=60))
"""

FEW = " cannot be started: Too many open files"
NO_MEMORY = "shares no memory with processes of this host, which sockets reach: Cannot allocate memory"

# what is limited (as `ulimit` has it), to how much, the options, the exit code, and what stderr says
LIMITS = [
    pytest.param("-n 32", ["--processes", "2"], 0, "", id="32 descriptors"),
    pytest.param("-n 32", ["--processes", "2", "--transport", "efa"], 0, "", id="32 descriptors, efa"),
    pytest.param("-n 32", ["--ranks", "4"], 0, "", id="32 descriptors, memory"),
    pytest.param("-n 20", ["--processes", "2"], 2, FEW, id="20 descriptors"),
    pytest.param("-n 32", ["--processes", "8"], 2, FEW, id="32 descriptors, 8 nodes"),
    pytest.param("-v 1500000", ["--processes", "2"], 0, NO_MEMORY, id="1.5 GB of addresses"),
]


def launched(folder: Path, *options: bytes | str, limit: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "overlap", "run", *options]
    return subprocess.run(
        ["bash", "-c", f'ulimit {limit} && exec "$@"', "limited", *command],
        cwd=folder,
        env=environment(OVERLAP_FLIGHT_DIR=str(folder / "flights")),
        capture_output=True,
        timeout=2 * LIMIT_S,
        check=False,
    )


@pytest.mark.faults
@pytest.mark.parametrize(("limit", "options", "code", "said"), LIMITS)
def test_a_process_has_little(tmp_path: Path, limit: str, options: list[str], code: int, said: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = launched(tmp_path, *options, "train.py", limit=limit)
    assert (done.returncode, said in done.stderr.decode()) == (code, True), done.stderr
    assert done.stdout.count(f"{float(options[1])}".encode()) == (0 if code else int(options[1]))


@pytest.mark.parametrize("name", ["overlap loop watch", "overlap-reduce-0"])
def test_where_no_thread_can_be_had_the_world_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have so many (ulimit -u), and a container too."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main(rank: overlap.Rank) -> None:
        await rank.all_reduce(np.ones(1 << 20))

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises((overlap.UsageError, overlap.RankFailedError)) as caught:
        overlap.run(main, ranks=2, timeout_s=60)
    cause = getattr(caught.value, "cause", caught.value)
    told = (
        f"no thread for {name!r} (can't start new thread); a world needs a few: allow more (ulimit -u), or spread the "
        "ranks over processes of several machines"
    )
    assert (type(cause), str(cause)) == (overlap.UsageError, told)


def test_a_thread_that_is_started_twice_is_no_matter_of_limits() -> None:
    thread = threading.Thread(target=lambda: None)
    start_thread(thread)
    with pytest.raises(RuntimeError, match="threads can only be started once"):
        start_thread(thread)
    thread.join()


@pytest.mark.faults
def test_names_need_not_be_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/tr\xe9.py", "w") as file:
        file.write(PROGRAM.replace("    return", "    if rank.rank: raise ValueError('no')\n    return"))
    here = Path(os.fsdecode(folder))
    done = launched(here, "--processes", "2", "--trace", b"r\xe9.json", b"tr\xe9.py", limit="-c 0")
    assert done.returncode == 1
    last = done.stderr.decode(errors="replace").splitlines()[-1]
    assert last == "overlap: rank 1 failed at tr\\udce9.py:8: ValueError: no"
