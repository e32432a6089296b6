"""The example of JAX, where it is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_ranks_learn_alike():
    pytest.importorskip("jax", reason="not installed: jax")
    script = ROOT / "examples" / "20_jax.py"
    done = subprocess.run([sys.executable, script, "10"], capture_output=True, text=True, timeout=100, check=True)
    words = done.stdout.split()
    assert words[:1] == ["loss"]
    assert done.stdout.endswith("on both ranks alike: True\n")
    assert float(words[5].strip(";")) < float(words[1].strip(","))
