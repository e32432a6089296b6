"""Long commands that are ended early: a sentence, an exit code, and nothing that Python itself has to say."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import overlap

# Commands that say at once how far they are, and again after each piece of work.
TALKING = """
import sys
from overlap.cli import main, pace
pace._FIRST_S = pace._AGAIN_S = 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    async def program(rank):
        for step in range(10):
            with rank.step(step):
                for _ in range(8):
                    await rank.all_reduce(rank.compute(lambda: np.zeros(64, np.float32), seconds=1e-3))

    path = str(tmp_path_factory.mktemp("trace") / "run.json")
    overlap.run(program, ranks=8, clock="virtual", trace=path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code", "said"), [
    (signal.SIGINT, 130, "overlap: interrupted"),
    (signal.SIGTERM, 143, "overlap: ended by SIGTERM"),
])  # fmt: skip
def test_it_ends_with_a_sentence(ending, code, said, trace):
    command = [sys.executable, "-c", TALKING, "timeline", "--advise", trace]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        first = child.stderr.readline()
        child.send_signal(ending)
        rest = child.stderr.read()
        child.stdout.read()
    assert first.startswith("overlap: ")
    assert child.returncode == code, rest
    told = [line for line in rest.splitlines() if " done in " not in line and "replaying" not in line]
    assert told[-1:] == [said], rest
    assert "never awaited" not in rest
    assert "Traceback" not in rest
