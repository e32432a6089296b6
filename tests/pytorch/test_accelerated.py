"""accelerate and Trainer take our backend when the program has initialised it, as docs/pytorch.md says."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from overlap.processes.place import without_launcher_variables

ROOT = Path(__file__).parents[2]
RECIPE = 'import overlap.torch\n\ntorch.distributed.init_process_group("overlap")\n'

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("library", "name", "reduced"), [("accelerate", "accelerate", 2), ("transformers", "trainer", 2)]
)
def test_it_trains_on_our_backend(library: str, name: str, reduced: int, tmp_path: Path) -> None:
    if find_spec(library) is None or find_spec("accelerate") is None:
        pytest.skip(f"not installed: {library}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environ = {**without_launcher_variables(os.environ), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [*torchrun, "-m", "tests.pytorch.accelerated", name, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    for rank, line in enumerate(told):
        start, _, count = line.rpartition("reduced=")
        assert start == f"rank {rank}: overlap, same=True, trained=True, "
        assert int(count) >= reduced
    assert len(told) == 2


def test_the_page_has_the_two_lines() -> None:
    assert RECIPE in (ROOT / "docs/pytorch.md").read_text()
