"""Manifests and scripts of the pages on engines: they are what their schemas say, and name what is there."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "engines"
KINDS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
# https://docs.skypilot.co/en/stable/reference/yaml-spec.html
SKYPILOT = {
    "name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run", "config",
}  # fmt: skip


def read(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="not installed: yaml")
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.engines
@pytest.mark.parametrize("name", ["jobset.yaml", "jobset-efa.yaml", "trainjob.yaml"])
def test_a_manifest_is_of_its_kind(name: str) -> None:
    """Also field by field: the models pass over fields that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="not installed: kubeflow-trainer-api")
    manifest = read(name)
    made = getattr(models, KINDS[manifest["kind"]]).from_dict(manifest)
    assert unknown(manifest, made.to_dict()) == []


def unknown(told: Any, known: Any, at: str = "") -> list[str]:
    """Return the paths of fields that a model has dropped or changed."""
    if isinstance(told, dict):
        return [path for key, value in told.items() for path in unknown(value, (known or {}).get(key), f"{at}/{key}")]
    if isinstance(told, list):
        pairs = zip(told, known or [None] * len(told), strict=True)
        return [path for index, pair in enumerate(pairs) for path in unknown(*pair, f"{at}/{index}")]
    return [] if told == known else [at]


def test_unknown_fields_are_found() -> None:
    assert unknown({"a": [{"b": 1, "c": 2}], "d": 3}, {"a": [{"b": 1}], "d": 4}) == ["/a/0/c", "/d"]


@pytest.mark.parametrize("name", ["jobset.yaml", "jobset-efa.yaml"])
def test_the_first_pod_is_where_the_others_look_for_it(name: str) -> None:
    """Its name in the DNS is made of the names of the set, the job, two indices, and the subdomain: that of the set."""
    manifest = read(name)
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    command = " ".join(container["command"])
    host = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    assert f"--rdzv-endpoint {host}:29500 " in command
    assert f"--nnodes {spec['completions']} " in command
    assert spec["parallelism"] == spec["completions"]
    options = set(re.findall(r"--[a-z-]+", command))
    help_text = subprocess.run(
        [sys.executable, "-m", "overlap", "run", "--help-all"], capture_output=True, text=True, check=True
    ).stdout
    assert options <= set(re.findall(r"--[a-z-]+", help_text))


def test_the_task_for_skypilot_has_known_fields_only() -> None:
    task = read("sky.yaml")
    assert set(task) <= SKYPILOT
    assert subprocess.run(["bash", "-n", "-c", task["run"]], check=False).returncode == 0
    assert set(re.findall(r"SKYPILOT_[A-Z_]+", task["run"])) == {
        "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES",
    }  # fmt: skip


# Starts as many tasks as the script asks for on one node, with the variables of Slurm.
SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] || exit 9
shift
tasks=$(sed -n 's/^#SBATCH --ntasks-per-node=//p' "$SCRIPT")
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""

PROGRAM = """
import numpy as np, os, overlap, stat

async def main(rank):
    total = await rank.all_reduce(np.ones(1))
    await rank.state.save(1, {"total": total})
    return int(total[0])

mode = os.stat(os.environ["OVERLAP_SECRET_FILE"]).st_mode
line = f"{overlap.run(main)[0]} {oct(stat.S_IMODE(mode))}\\n"
os.write(1, line.encode())  # one write: ranks share the pipe, and must not tear each other's lines
"""


@pytest.mark.slow
def test_the_script_for_slurm_starts_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(stat.S_IRWXU)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "python").symlink_to(sys.executable)
    environ = os.environ | {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SCRIPT": str(FOLDER / "slurm.sh"),
        "SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(tmp_path), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    (tmp_path / "python").unlink()
    ended = subprocess.run(
        ["bash", str(FOLDER / "slurm.sh")], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert sorted(ended.stdout.split("\n")) == ["", *["4 0o600"] * 4], ended.stderr
    assert not list(tmp_path.glob(".overlap-secret*"))
    assert len(list(tmp_path.glob("state/*/rank-*-of-4.safetensors"))) == 4
