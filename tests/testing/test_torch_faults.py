"""Faults that programs of PyTorch meet."""

import signal
from pathlib import Path

import pytest

from overlap.testing import Ranks, RanksFailed
from tests.errors import error_of

torch = pytest.importorskip("torch", reason="torch is not installed")
dist = torch.distributed
pytest.importorskip("torch.distributed.checkpoint", reason="torch is not installed")

HERE = Path(__file__).parent / "programs"


def saves(path):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 2)
    for step in range(3):
        dist.all_reduce(model.weight.detach())
        if dist.get_rank() == 0:
            torch.save({"step": step}, path / f"{step}.pt")
            (path / "latest").write_text(str(step))


def test_a_full_disk_is_met_by_the_rank_that_writes(tmp_path: Path) -> None:
    run = Ranks().function(saves, tmp_path, ranks=2, faults="disk(rank=0, at=1)", check=False)
    assert run.verdict is not None
    assert run.verdict.kind == "crash"
    assert "rank 0 failed at test_torch_faults.py:" in run.verdict.text
    assert "No space left on device (a fault of this test has filled the disk of rank 0: handle it" in run.verdict.text
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt", "latest"] or len(list(tmp_path.iterdir())) == 2
    assert not Ranks().function(saves, tmp_path, ranks=2, faults="disk(rank=1, at=0)").verdicts


def saves_parts(path):
    dist.init_process_group("gloo")
    state = {f"weight {dist.get_rank()}": torch.ones(4)}
    torch.distributed.checkpoint.save(state, checkpoint_id=path)


def test_a_checkpoint_that_cannot_be_restored_is_told(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    run = Ranks().function(saves_parts, whole, ranks=2)
    assert run.restores(whole)
    part = next(iter(sorted(whole.glob("*.distcp"))))
    part.write_bytes(part.read_bytes()[:-400])
    assert "is too short for 'weight 0'" in run.restores(whole).problem
    part.unlink()
    assert "lacks __0_0.distcp" in run.restores(whole).problem
    unfinished = tmp_path / "unfinished"
    run = Ranks().function(saves_parts, unfinished, ranks=2, faults="disk(rank=1, at=1)", check=False)
    assert run.verdict is not None
    assert "and no .metadata: it was never finished" in run.restores(unfinished).problem
    torch.save({"a": 1}, tmp_path / "a.pt")
    assert run.restores(tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:100])
    assert not run.restores(tmp_path / "a.pt")


def handles():
    dist.init_process_group("gloo")
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    for _ in range(3):
        dist.barrier()
    return told


def handles_nothing():
    dist.init_process_group("gloo")
    dist.barrier()


def test_a_signal_comes_to_the_rank_that_it_is_for() -> None:
    run = Ranks().function(handles, ranks=2, faults="signal(rank=1, at=1)")
    assert run.results == [[], [signal.SIGTERM]]
    ended = Ranks().function(handles_nothing, ranks=2, faults="signal(rank=1)", check=False)
    assert ended.verdict is not None
    assert "the rank was ended by SIGTERM, which its program does not handle" in ended.verdict.text


def test_a_flipped_bit_in_a_gradient_makes_other_weights_on_all_ranks() -> None:
    ranks = Ranks(HERE)
    calm = ranks.program("ddp.py", ["--steps", "2"], ranks=2)
    gradient = next(issue.index for issue in calm.record.of(1) if issue.call.op == "all_reduce")
    flipped = ranks.program("ddp.py", ["--steps", "2"], ranks=2, faults=f"flip(rank=1, at={gradient})")
    assert flipped.same()
    assert not flipped.equals(calm)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("fault", ["die(rank=1, at=6)", "cut(rank=1, at=6)", "stop(rank=1, at=6)"])
def test_a_rank_that_is_gone_is_named(fault: str) -> None:
    run = Ranks(HERE).program("ddp.py", ranks=4, faults=fault)  # passes, for its error names the rank that is gone
    assert run.verdict is not None
    assert run.verdict.ranks[0] == 1
    assert run.verdict.kind in ("rank lost", "dead")
    assert [str(each) for each in run.faults] == [fault]
    assert f'faults="{fault}"' in str(error_of(RanksFailed, run.check))


@pytest.mark.slow
def test_seeds_with_faults_pass_where_the_program_names_the_lost_rank() -> None:
    run = Ranks(HERE).program("ddp.py", ["--steps", "2"], ranks=3, faults="die, late, slow", seeds=5)
    assert run.same()  # of the first, which has no faults; the others raise where they fail


LOOP = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(int(sys.argv[sys.argv.index("--steps") + 1])):
    dist.all_reduce(torch.ones(2 if step == 1 and dist.get_rank() else 1))
"""


@pytest.mark.slow
def test_a_failing_program_is_given_fewer_steps(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    error = error_of(RanksFailed, Ranks(tmp_path).program, "loop.py", ["--lr", "1", "--steps", "30"], ranks=4, seeds=2)
    last = str(error).splitlines()[-1]
    assert last == "repeat: ranks.program(\"loop.py\", args=['--lr', '1', '--steps', '2'], ranks=2)"
    again = Ranks(tmp_path).program("loop.py", ["--lr", "1", "--steps", "2"], ranks=2, check=False)
    assert again.verdict == error.verdict
    assert Ranks(tmp_path).program("loop.py", ranks=2, steps=1).line == (
        "ranks.program(\"loop.py\", args=['--steps', '1'], ranks=2)"
    )
