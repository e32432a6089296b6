"""The page's six ways to start one program, each run as the page has it where this machine has the launcher."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from .clusters import ROOT, TIMEOUT_S, line_of

SRUN = """#!/bin/bash
[[ $1 == -n ]] || exit 9
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$2 SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost
export SLURM_JOB_ID=17
tasks=$2
shift 2
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""
LAUNCHERS = ("python", "overlap", "torchrun", "mpiexec", "srun")


def test_the_page_has_six_lines() -> None:
    begins = [*LAUNCHERS, "overlap run --engine ray"]
    lines = [line_of(begin) for begin in begins]
    assert len(set(lines)) == 6
    assert all(line.split("#")[0].rstrip().endswith("examples/11_data_parallel.py") for line in lines)


@pytest.mark.parametrize("launcher", [
    pytest.param(each, marks=pytest.mark.engines if each == "mpiexec" else pytest.mark.slow) for each in LAUNCHERS
])  # fmt: skip
def test_a_line_of_the_page_runs_the_example(launcher: str, tmp_path: Path) -> None:
    if launcher == "torchrun":
        pytest.importorskip("torch", reason="torch is not installed")
    if launcher == "mpiexec":
        pytest.importorskip("mpi4py", reason="not installed: mpi4py")
    (tmp_path / "srun").write_text(SRUN)  # stands in for Slurm's
    (tmp_path / "srun").chmod(stat.S_IRWXU)
    command = [*shlex.split(line_of(launcher), comments=True), "10"]
    environ = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall(r"step 10: loss \d", ended.stdout)) == 1
    assert re.search(r"overlap: \d+% of \d+ ms of communication was hidden", ended.stdout)
