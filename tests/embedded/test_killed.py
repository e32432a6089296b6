"""A process that is killed while others hold results that lie in its memory."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .holding import TIMEOUT_S

SIZE, KILLED = 3, 1


@pytest.mark.slow
def test_results_that_ranks_share_outlive_the_process_whose_memory_it_was(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.embedded.holding"]
    processes = [
        subprocess.Popen([*program, str(rank), str(SIZE), str(tmp_path), str(KILLED)], stdout=subprocess.PIPE)
        for rank in range(SIZE)
    ]
    try:
        told = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        found = json.loads(told[rank])
        assert found["culprit"] == KILLED
        assert found["right"] == [True] * SIZE
        assert found["mapped"] == [SIZE, 1, 0]
