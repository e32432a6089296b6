"""`overlap simulate --mtbf`: the goodput of a program, from its own steps and losses in virtual time."""

import json

import pytest

PROGRAM = """
import sys
import numpy as np
import overlap
from overlap.parallel import AdamW, DataParallel, Sharded

async def main(rank):
    params, optimizer = {"w": np.zeros(1000, np.float32)}, AdamW(lr=0.1)
    if sys.argv[1] == "whole":
        model = DataParallel(rank, params, optimizer=optimizer)
    else:
        model = Sharded(rank, params, optimizer=optimizer, replicate=int(sys.argv[1]) or None)
    while model.steps < 40:
        with rank.step(model.steps):
            model.reduce("w", rank.compute(lambda w: w - 1, model["w"], seconds=0.1))
            await model.step()
    await model.finish()

overlap.run(main, ranks=4)
"""


@pytest.fixture
def goodput(overlap, tmp_path):
    """Return a function that simulates, and returns the figures."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)

    def run(manner, *options):
        code, out, err = overlap("simulate", "--mtbf", "1h", "--json", *options, str(program), manner)
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.mark.slow
def test_losses_cost_what_they_cost_in_the_program(goodput):
    found = goodput("whole", "--spares", "2", "--recovery", "0.4s")
    assert found["step_s"]["4"] == pytest.approx(0.1, rel=1e-3)
    assert (found["units"], found["unit"], found["spares"], found["mtbf_s"]) == (4, "rank", 2, 3600)
    for loss in found["losses"]:
        assert loss["repeated_steps"] == 0
        assert 0 <= loss["repeated_s"] <= 0.11
        assert loss["pause_s"] == pytest.approx(0.4, rel=1e-3)
    result = found["goodput"]
    parts = ("share", "smaller_share", "repeated_share", "pause_share")
    assert sum(result[part] for part in parts) == pytest.approx(1.0)
    assert result["losses"] > result["spares_used"] == 2
    assert found["daly"]["share"] == pytest.approx(found["young"]["share"], rel=1e-3)


@pytest.mark.slow
def test_a_seed_repeats_the_losses(goodput):
    first, again = (goodput("whole", "--spares", "2", "--recovery", "0.4s") for _ in range(2))
    assert first == again
    assert goodput("whole", "--seed", "1")["goodput"] != goodput("whole")["goodput"]


@pytest.mark.slow
def test_replicas_repeat_steps(goodput):
    found = goodput("5")
    repeated = [loss["repeated_steps"] for loss in found["losses"]]
    assert max(repeated) in range(1, 7)
    for loss in found["losses"]:
        assert loss["repeated_s"] == pytest.approx(0.1 * (loss["repeated_steps"] + 0.5), abs=0.051)


def test_the_page(overlap, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    code, out, _ = overlap("simulate", "--mtbf", "3h", "--spares", "1", "--duration", "2h", str(program), "whole")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "4 ranks, 1 spare, virtual time"
    assert "of full speed over 2 h" in lines[1]
    assert any(line.startswith("  restarts, Daly  ") for line in lines)


@pytest.mark.parametrize(
    ("options", "manner", "message"),
    [
        (["--mtbf", "1h"], "0", "its steps are lost with a process|steps are lost with a process"),
        (["--mtbf", "1h"], "30", "the program begins again from its first step"),
        (["--mtbf", "1h", "--sweep", "ranks=2,4"], "whole", "leave out --sweep and --trace"),
        (["--mtbf", "often"], "whole", "expected a time such as 90s, 5min, 3h or 2d"),
    ],
)
def test_programs_that_do_not_go_on_are_refused(overlap, tmp_path, options, manner, message):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    code, _, err = overlap("simulate", *options, str(program), manner)
    assert code == 2
    assert any(part in " ".join(err.split()) for part in message.split("|")), err
