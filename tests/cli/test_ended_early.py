"""Long commands that are ended early: a sentence, an exit code, and nothing that Python itself has to say."""

import os
import signal
import subprocess
import sys

import pytest

# Commands that say at once how far they are, and again after each piece of work.
TALKING = """
import sys
from overlap.cli import main
from overlap.cli.simulate import simulation
simulation._FIRST_S = simulation._AGAIN_S = 0
sys.exit(main(sys.argv[1:]))
"""


PROGRAM = """
import overlap

async def main(rank):
    for _ in range(10**6):
        await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code", "said"), [
    (signal.SIGINT, 130, "overlap: interrupted"),
    (signal.SIGTERM, 143, "overlap: ended by SIGTERM"),
])  # fmt: skip
def test_it_ends_with_a_sentence(ending, code, said, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-c", TALKING, "simulate", "--cluster", "trn1.2xlarge", str(tmp_path / "train.py")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        first = child.stderr.readline()
        child.send_signal(ending)
        rest = child.stderr.read()
        child.stdout.read()
    assert first.startswith("overlap: ")
    assert child.returncode == code, rest
    told = [line for line in rest.splitlines() if "simulating" not in line]
    assert told[0] == said, rest
    assert "never awaited" not in rest
    assert "Traceback" not in rest
