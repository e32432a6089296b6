"""`overlap demo --survive`: one of two processes is killed, a spare joins, and the weights are those of the history."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from overlap.cli.demo import survival

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_survivor_and_the_spare_go_on_with_the_same_weights():
    command = [sys.executable, "-m", "overlap", "demo", "--survive", "--width", "100", "--ascii"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 20 has ended: process 0 (pid " in ended.stdout
    assert re.search(r"processes 1 and 2 went on after step (19|20)\n", ended.stdout.replace(" \n", "\n"))
    assert "weights of both are equal to those of a run with the same history of members" in ended.stdout


def test_other_weights_are_noticed():
    """The comparison is with the digest that the survivor has printed."""
    story = survival._Story()
    story.record(1, {"members": [0, 1], "step": 0, "pid": 1})
    story.record(1, {"members": [1, 2], "step": 20, "pid": 1})
    for member in (1, 2):
        story.record(member, {"digest": "of other weights"})
    assert story.digests == {1: "of other weights", 2: "of other weights"}
    assert survival.replay_digest(story.history, 22) not in story.digests.values()
