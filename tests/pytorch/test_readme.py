"""The first program of the page on PyTorch, as it is printed, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overlap.timeline import read_trace

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.torch
def test_the_program_trains_all_ranks_alike_and_shows_what_computes(tmp_path: Path) -> None:
    [program] = re.findall(r"## One word.*?```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(), re.DOTALL)
    script, trace = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OVERLAP_TRACE": str(trace), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(re.findall(r"rank (\d): (-?\d+\.\d{6})", done.stdout))  # torchrun may join lines of two ranks
    assert set(told) == {"0", "1"}
    assert told["0"] == told["1"]
    timeline = read_trace(trace)
    assert {"forward module.0", "backward module.0", "Adam"} <= {span.name for span in timeline.spans}
    assert timeline.meta["torch"] == "yes"
