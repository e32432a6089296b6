"""Wrong and right programs of PyTorch, and faults that they meet."""

import json
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from overlap.cli import main
from overlap.testing import Ranks, RanksFailed
from tests.errors import error_of

# -- wrong divisors, groups and inputs of programs of PyTorch, and right programs, which are compared or declined ------

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torch.distributed.checkpoint", reason="torch is not installed")

HERE = Path(__file__).parent / "programs"


def marked(program: str, mark: str) -> str:
    """Return the line of a program that ends with a comment."""
    lines = (HERE / program).read_text().splitlines()
    return f"{program}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


def run_program(program: str, *args: str, **settings: object):
    return Ranks(HERE, **{"ranks": 4, **settings}).program(program, list(args), check=False)


def test_the_reduction_of_a_gradient_is_one_of_a_rank_that_made_the_update() -> None:
    from overlap.testing.as_one import AsOne, GradientDifference
    from overlap.testing.substitutes import UpdateRecord

    issues = [SimpleNamespace(index=0, call=SimpleNamespace(op="all_reduce")) for _ in range(2)]
    run = SimpleNamespace(record=SimpleNamespace(issues_of=lambda rank: issues[rank : rank + 1], transfers=[]))
    second = UpdateRecord(gradients={"w": None}, issued=1)  # rank 0 makes one update, and rank 1 two
    steps = [UpdateRecord()], [UpdateRecord(), second]
    comparison = AsOne(run, [SimpleNamespace(steps=each) for each in steps], None)
    assert comparison._find_reducing_operation(GradientDifference("w", 1, 2.0, "train.py:1")) is issues[1]


# -- without the option ----------------------------------------------------------------------------------------------


def test_a_gradient_that_is_reduced_over_ranks_with_other_parts_is_named() -> None:
    verdict = run_program("tensor_parallel.py", "group").verdict
    assert verdict.kind == "wrong reduction"
    assert verdict.text.startswith("the gradient of 'up' is reduced over ranks 0-1 by all_reduce #1 of group '0-1' (")
    assert verdict.text.endswith("; ranks 0, 2 hold the same as rank 0")
    assert verdict.lines == (marked("tensor_parallel.py", "reduction"),)


def test_inputs_that_differ_in_a_tensor_parallel_group_are_named() -> None:
    verdict = run_program("tensor_parallel.py", "inputs").verdict
    assert verdict.kind == "inputs differ"
    assert verdict.lines[0] == marked("tensor_parallel.py", "forward")
    assert re.search(r"rank 1 has another input \(\w+\) than rank 0 .* it meets 'up' first", verdict.text)


def test_inputs_that_differ_though_dtensor_has_them_as_replicated_are_named() -> None:
    verdict = run_program("wrong.py", "other_inputs").verdict
    assert verdict.kind == "inputs differ"
    assert "ranks 0-3 declare it as replicated" in verdict.text
    assert verdict.lines == (marked("right.py", "backward"),)


def test_parameters_broadcast_in_another_order_are_named() -> None:
    verdict = run_program("broadcasts.py", "set", seed=1).verdict
    assert verdict.kind == "broadcast order"
    assert re.search(r"has '\w+.weight' on rank \d and '\w+.weight' on rank 0", verdict.text)
    assert verdict.lines == (marked("broadcasts.py", "broadcast"),)
    assert not run_program("broadcasts.py", seed=1).verdicts


def test_a_parameter_that_one_rank_has_frozen_is_named() -> None:
    verdict = run_program("wrong.py", "frozen").verdict
    assert verdict.kind == "gradient missing"
    assert verdict.text.endswith("'0.weight' is frozen (requires_grad=False) on rank 1, and rank 0 trains it")
    assert verdict.lines == (marked("wrong.py", "frozen"),)


# -- with it ---------------------------------------------------------------------------------------------------------

DIFFERENCES = {  # by program: the text, and the marked line
    "sequence_divisor": (
        "in update 1 (right.py:N) the gradient of '0.weight' and 3 more is 2 times too large against that of one rank "
        "on the joined batch: divided by 2 of the 4 ranks of its group, ranks 0-3, by all_reduce #",
        "sequence_divisor",
    ),
    "diloco_divisor": (
        "in update 4 (wrong.py:N) the gradient of '0.weight of model 2' and 3 more is 2 times too large against that "
        "of one rank, with the same data for ranks that hold the same: divided by 2 of the 4 ranks",
        "diloco_divisor",
    ),
    "loss_averaged_twice": (
        "'0.weight' and 3 more is 4 times too small against that of one rank on the joined batch: divided by 16, where "
        "its group has 4 ranks,",
        "backward",
    ),
    "local_norms": ("the gradient of '0.weight' and 3 more differs from that of one rank", "backward"),
    "unscaled": ("'0.weight' first, are 2 times too large: none of the 2 means", "unscaled"),
    "reduced_twice": ("4 times too large against that of one rank on the joined batch: not divided", "reduced_twice"),
}


@pytest.mark.parametrize("program", DIFFERENCES)
def test_gradients_that_differ_from_those_of_one_rank_are_named(program) -> None:
    (verdict,) = run_program("wrong.py", program, as_one=True).verdicts
    text, mark = DIFFERENCES[program]
    assert verdict.kind == "gradient differs"
    assert text in re.sub(r"(\w+\.py):\d+", r"\1:N", verdict.text)
    assert verdict.lines[0] == marked("wrong.py" if mark == program else "right.py", mark)
    assert not run_program("wrong.py", program).verdicts  # only the comparison finds it


def test_gradients_that_are_never_synchronised_are_named_by_the_weights() -> None:
    verdict = run_program("wrong.py", "never_synchronised").verdict
    assert verdict.kind == "weights differ"
    assert "'0.weight' differs" in verdict.text
    assert verdict.lines == (marked("wrong.py", "never_synchronised"),)


@pytest.mark.parametrize("program", ["same_dropout", "same_epoch"])
def test_mistakes_that_are_not_claimed_are_not_named(program) -> None:
    assert not run_program("wrong.py", program, as_one=True).verdicts


def test_two_wrong_divisors_of_a_mesh_of_two_dims_are_two_differences() -> None:
    first, second = run_program("tensor_parallel.py", "divisor", "scale", ranks=8, as_one=True).verdicts
    assert "'up' and 1 more is 2 times too small" in first.text
    assert "divided by 8, where its group has 4 ranks, ranks 0, 2, 4, 6, by all_reduce" in first.text
    assert first.lines[0] == marked("tensor_parallel.py", "reduction")
    assert second.text.count("'scale' ") == 1
    assert second.lines[0] == marked("tensor_parallel.py", "second reduction")


def test_the_command_has_text_json_and_the_line_that_repeats_it(capsys) -> None:
    command = ["test", str(HERE / "tensor_parallel.py"), "--ranks", "4", "--as-one"]
    assert main([*command, "--", "divisor"]) == 1
    text = capsys.readouterr().out
    assert "\ngradient differs: in update 1 (" in text
    assert text.rstrip().endswith("--ranks 4 --as-one -- divisor")
    assert main([*command, "--json", "--", "divisor"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [verdict["kind"] for verdict in document["verdicts"]] == ["gradient differs"]
    assert document["repeat"].endswith("--ranks 4 --as-one -- divisor")
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("\n6 gradients compared with one rank on the joined batch\n")


# -- right programs --------------------------------------------------------------------------------------------------

ALIKE = "with the same data for ranks that hold the same: "
NOTES = {  # by program: what is said, if it is not "compared with one rank on the joined batch"
    "ddp_batch_norm": f"{ALIKE}with 1 rank, the forwards differ",
    "local_steps": f"{ALIKE}ranks make updates of their own",
    "stages": "compared with 2 ranks, the fewest that can run it, with the same data",
    "late": "not compared: 'weight' was made after the first forward had begun",
    "closures": "not compared: the first optimizer.step() (right.py:",
    "augmented_within": "draws random numbers",
    "only_forward": "not compared: the program never calls backward",
    "summed": "and the loss is no mean: a divisor may count data, or ranks",
    "by_hand_summed": "and the loss is no mean: a divisor may count data, or ranks",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", re.findall(r"@right\ndef (\w+)", (HERE / "right.py").read_text()))
def test_right_programs_are_compared_without_a_difference_or_declined(program) -> None:
    run = run_program("right.py", program, as_one=True)
    assert not run.verdicts
    assert NOTES.get(program, "compared with one rank on the joined batch") in run.as_one
    assert not run_program("right.py", program).verdicts


# -- faults that programs of PyTorch meet ------------------------------------------------------------------------------

dist = torch.distributed


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
    assert "rank 0 failed at test_as_one.py:" in run.verdict.text
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
    assert "was ended by SIGTERM: its program has set no handler by signal.signal" in ended.verdict.text


def test_a_flipped_bit_in_a_gradient_makes_other_weights_on_all_ranks() -> None:
    ranks = Ranks(HERE)
    calm = ranks.program("ddp.py", ["--steps", "2"], ranks=2)
    gradient = next(issue.index for issue in calm.record.issues_of(1) if issue.call.op == "all_reduce")
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
