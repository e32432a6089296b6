"""Pages on engines: their manifests and scripts, their six ways to start a program, and their transport over MPI."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.transports.test_factory import install

from .clusters import TIMEOUT_S, line_of

# -- manifests and scripts of the pages on engines: they are what their schemas say, and name what is there ------------

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


# -- the page's six ways to start one program, each run as the page has it where this machine has the launcher ---------

SRUN_OF_TASKS = """#!/bin/bash
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
    (tmp_path / "srun").write_text(SRUN_OF_TASKS)  # stands in for Slurm's
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


# -- the example of a transport over MPI carries a world under mpiexec -------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples/transports/mpi.py"

MPI_PROGRAM = """
import numpy as np
import trio
import overlap

EAGER_BYTES = 16 << 10


async def main(rank):
    other = (rank.rank + 1) % rank.world_size
    large = await rank.all_reduce(np.full(1 << 20, rank.rank + 1.0))
    gathered = await rank.all_gather(np.array([rank.rank]))
    for nbytes in (0, 1, EAGER_BYTES, EAGER_BYTES + 1, 5 << 20):
        sent = rank.send(np.full(nbytes, rank.rank, np.uint8), other, tag=nbytes)
        got = await rank.recv(((nbytes,), np.uint8), (rank.rank - 1) % rank.world_size, tag=nbytes)
        assert (got == (rank.rank - 1) % rank.world_size).all(), nbytes
        await sent
    with trio.move_on_after(0.01):
        await rank.recv(((3,), np.uint8), other, tag=99)  # nobody sends: it is withdrawn
    sent = rank.send(np.full(3, rank.rank), other, tag=98)
    assert (await rank.recv(((3,), int), None, tag=98))[0] == (rank.rank - 1) % rank.world_size
    await sent
    return float(large[0]), gathered.tolist()


print(overlap.run(main)[0], flush=True)
"""

DIFFERENT = """
import numpy as np
import overlap


async def main(rank):
    await rank.all_reduce(np.ones(4 + rank.rank))


try:
    overlap.run(main)
except overlap.RankFailedError as error:
    print("(4,)" in str(error), "(5,)" in str(error), flush=True)
"""


def run(folder: Path, program: str, processes: int) -> list[str]:
    """Run a program under mpiexec with the transport installed; return its lines, in alphabetical order."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py mpich")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    install(folder, "mpi", "mpi:make", EXAMPLE.read_text())
    script = folder / "train.py"
    script.write_text(program)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [str(mpiexec), "-n", str(processes), sys.executable, "-m", "mpi4py", str(script)]
    environment = {**os.environ, "PYTHONPATH": path, "OVERLAP_TRANSPORT": "mpi"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.engines
@pytest.mark.parametrize("processes", [2, 3])
def test_a_world_over_mpi(tmp_path: Path, processes: int) -> None:
    total = processes * (processes + 1) / 2
    assert run(tmp_path, MPI_PROGRAM, processes) == [str((total, list(range(processes))))] * processes


@pytest.mark.engines
def test_ranks_that_disagree_over_mpi_hear_of_both_calls(tmp_path: Path) -> None:
    lines = run(tmp_path, DIFFERENT, 2)
    assert lines == ["True True"] * 2


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
