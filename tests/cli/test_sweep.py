"""`overlap simulate --sweep NAME=V,V,...`: every combination, a row for each, whatever happens to the others."""

import json
import signal

import pytest

# Takes so many milliseconds of virtual time, and fails at 3.
WORK = """
import argparse
import sys
import overlap

async def main(rank, ms):
    if ms == 3:
        raise ValueError("three")
    await rank.compute(int, name="work", seconds=ms / 1e3)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ms", type=int, default=1)
    parser.add_argument("--batch-size", default=None)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    print("not shown", sys.argv)
    overlap.run(main, args.ms, ranks=args.ranks)
"""
ASSUMED = """\
assumed at every point: computes take what they state, or reach 1 of the
  bfloat16 peak and 1 of the memory's bandwidth; Peer Direct; no jitter, no
  stragglers, no slow wires; compute and communication do not slow each other
  down

"""


@pytest.fixture
def swept(overlap, script):
    """Return a function that sweeps WORK, or another program, and returns (exit code, rows as JSON)."""

    def run(*argv, text=WORK, code=0):
        given, out, err = overlap("simulate", "--json", *argv, script(text))
        assert given == code, err
        return json.loads(out)["rows"]

    return run


def test_the_table(overlap, script):
    assert overlap("simulate", "--sweep", "ranks=1,2", "--sweep", "ms=1,4,5", script(WORK)) == (
        0,
        ASSUMED
        + """\
  ranks  ms  step ms  exposed  overlap  step time
*     1   1    1.000     0.0%      n/a  ████▉
      1   4    4.000     0.0%      n/a  ███████████████████▎
      1   5    5.000     0.0%      n/a  ████████████████████████
      2   1    1.000     0.0%      n/a  ████▉
      2   4    4.000     0.0%      n/a  ███████████████████▎
      2   5    5.000     0.0%      n/a  ████████████████████████
* shortest step: ranks=1, ms=1
""",
        "",
    )


def test_the_table_in_ascii_with_throughput(overlap, script):
    text = WORK.replace("parser.parse_args()", "parser.parse_args()\n    samples_per_step = args.ms ** 2")
    out = overlap("simulate", "--ascii", "--sweep", "ms=2,4", "--cluster", "local", "--ranks", "1", script(text))[1]
    assert (
        out
        == ASSUMED
        + """\
  ms  ranks  step ms  exposed  overlap  samples/s  step time
   2      1    2.000     0.0%      n/a    2000.00  ############
*  4      1    4.000     0.0%      n/a    4000.00  ########################
* highest throughput: ms=4
"""
    )


def test_the_table_fits_and_names_what_is_not_swept(overlap, script):
    """Bars give way first; an algorithm and a seed that differ from row to row are no assumption."""
    sweep = ("simulate", "--cluster", "local", "--algorithm", "ring", "--peer-direct")
    swept = ("--sweep", "algorithm=ring,mesh", "--sweep", "ms=2,3,4", "--width")
    wide, narrow = (overlap(*sweep, *swept, width, script(WORK))[1] for width in ("60", "58"))
    assert "ring" not in wide.partition("\n\n")[0]
    assert "Peer Direct; no jitter" in " ".join(wide.split())
    shown = wide.splitlines()
    first = shown.index("")
    assert shown[first + 1 :] == [
        "  algorithm  ms  ranks  step ms  exposed  overlap  step time",
        "*      ring   2      4    2.000     0.0%      n/a  ████▌",
        "       ring   3  failed: rank 0 failed at train.py:8:",
        "      ValueError: three; also failed: ranks 1-3",
        "       ring   4      4    4.000     0.0%      n/a  █████████",
        "       mesh   2      4    2.000     0.0%      n/a  ████▌",
        "       mesh   3  failed: rank 0 failed at train.py:8:",
        "      ValueError: three; also failed: ranks 1-3",
        "       mesh   4      4    4.000     0.0%      n/a  █████████",
        "* shortest step: algorithm=ring, ms=2",
    ]
    assert "  algorithm  ms  ranks  step ms  exposed  overlap\n" in narrow
    assert "█" not in narrow


def test_a_point_that_fails_is_a_row_and_the_others_go_on(overlap, script):
    code, out, err = overlap("simulate", "--sweep", "ms=1,3,x,2", script(WORK))
    assert (code, err) == (1, "")
    assert out.splitlines()[-6:] == [
        "  ms  ranks  step ms  exposed  overlap  step time",
        "*  1      4    1.000     0.0%      n/a  ████████████",
        "   3  failed: rank 0 failed at train.py:8: ValueError: three; also failed: ranks 1-3",
        "   x  failed: train.py: error: argument --ms: invalid int value: 'x'",
        "   2      4    2.000     0.0%      n/a  ████████████████████████",
        "* shortest step: ms=1",
    ]


def test_all_that_can_go_wrong_at_a_point(swept):
    [gone, large, fine] = swept("--sweep", "cluster=trn9,trn1.32xlarge,local", "--ranks", "33", code=1)
    assert "'trn9'" in gone["error"]
    assert large["error"].startswith("33 ranks do not fit: trn1.32xlarge x1 holds 32")
    assert (fine["error"], fine["outcome"]["world_size"]) == (None, 33)
    [row, _] = swept("--sweep", "ms=1,2", text="import sys; sys.exit(4)", code=1)
    assert row["error"] == "exit code 4"
    [row, _] = swept("--sweep", "ms=1,2", text="import sys; sys.exit('sorry')", code=1)
    assert row["error"] == "sorry"
    [row, _] = swept("--sweep", "ms=1,2", text="1 / 0", code=1)
    assert row["error"] == "ZeroDivisionError: division by zero"


def test_parameters_of_the_program_are_arguments_after_its_own(overlap, script):
    text = WORK.replace('print("not shown", sys.argv)', "print(sys.argv[1:], file=sys.stderr)")
    code, _, err = overlap("simulate", "--sweep", "batch_size=1MiB,x", "--sweep=--ranks=2,3", script(text), "--ms", "2")
    assert code == 0
    assert err.splitlines() == [
        str(["--ms", "2", "--batch-size", size, "--ranks", ranks]) for size in ("1MiB", "x") for ranks in "23"
    ]


def test_parameters_of_a_module_are_arguments_too(overlap, script):
    script(WORK, "swept_module.py")
    argv = ("--json", "--sweep", "ms=1,2", "-m", "swept_module", "--ranks", "3")
    outcomes = [row["outcome"] for row in json.loads(overlap("simulate", *argv)[1])["rows"]]
    assert [(found["world_size"], found["step_ns"]) for found in outcomes] == [(3, 10**6), (3, 2 * 10**6)]


@pytest.mark.slow
def test_parameters_of_the_simulation_win_over_the_options(swept):
    rows = swept("--cluster", "trn1.32xlarge", "--nodes", "4", "--seed", "1", "--sweep", "nodes=1,2")
    assert [row["outcome"]["world_size"] for row in rows] == [32, 64]
    own = WORK.replace("ranks=args.ranks", "cluster='trn2.48xlarge x3'")
    assert [row["outcome"]["world_size"] for row in swept("--sweep", "nodes=1,2", text=own)] == [64, 128]
    rows = swept("--cluster", "trn2.48xlarge", "--sweep", "lnc=1,2")
    assert [row["outcome"]["world_size"] for row in rows] == [128, 64]
    text = WORK.replace("seconds=ms / 1e3", "flops=1e12")
    rows = swept(
        "--cluster", "trn1.32xlarge", "--sweep", "efficiency=0.5,1", "--sweep", "dtype=float32,bfloat16", text=text
    )
    times_ns = [row["outcome"]["step_ns"] for row in rows]
    assert times_ns[0] > times_ns[1] > times_ns[3]
    assert len(set(times_ns)) == 4
    rows = swept("--sweep", "straggler_factor=1,3", "--straggler-share", "1")
    assert [row["outcome"]["step_ns"] for row in rows] == [10**6, 3 * 10**6]


@pytest.mark.slow
def test_switches_and_factors_can_be_swept(swept):
    text = WORK.replace("await rank.compute(", "rank.all_reduce(rank.empty(1 << 20)); await rank.compute(")
    rows = swept(
        "--cluster",
        "dl1.24xlarge x2",
        "--sweep",
        "peer_direct=yes,no",
        "--sweep",
        "slow_comm=all_reduce=1,*=2",
        text=text,
    )
    comm_ns = [row["outcome"]["comm_ns"] for row in rows]
    assert comm_ns[0] < comm_ns[1]
    assert comm_ns[0] < comm_ns[2] < comm_ns[3]


def test_json(overlap, script):
    code, out, _ = overlap("simulate", "--sweep", "ms=2,3,1", "--json-file", "rows.json", script(WORK))
    assert code == 1
    assert "* shortest step: ms=1\n" in out
    with open("rows.json", encoding="utf-8") as file:
        found = json.load(file)
    assert (found["schema_version"], found["sweep"], found["complete"]) == (1, {"ms": ["2", "3", "1"]}, True)
    assert [row["best"] for row in found["rows"]] == [False, False, True]
    assert found["rows"][1]["outcome"] is None
    assert "ValueError: three" in found["rows"][1]["error"]


def test_one_point_is_not_the_best_of_anything(swept):
    assert [row["best"] for row in swept("--sweep", "ms=1,3", code=1)] == [False, False]


def test_the_last_run_of_a_program_counts(swept):
    [row] = swept("--sweep", "ms=2", text=WORK + "    overlap.run(main, args.ms * 2)\n")
    assert row["outcome"]["step_ns"] == 4 * 10**6


def test_what_makes_no_difference_is_not_called_best(overlap, script):
    unused = WORK.replace("args = parser.parse_args()", "args = parser.parse_args(['--ms', '2'])")
    assert unused != WORK
    _, out, _ = overlap("simulate", "--sweep", "ms=1,2", script(unused))
    assert out.splitlines()[-1] == "all rows are equal: the program may not use ms"
    assert "*" not in out


INTERRUPTED = WORK.replace(
    'raise ValueError("three")', "import os, signal; os.kill(os.getpid(), signal.SIGINT); await rank.barrier()"
)


@pytest.mark.slow
def test_an_interrupt_keeps_the_rows_that_are_done(process, script, tmp_path):
    sweep = ("--sweep", "ms=2,1,3,4")
    child = process("simulate", "--json-file", "rows.json", *sweep, script(INTERRUPTED), PYTHONIOENCODING="utf-8")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGINT
    assert [line.split()[:3] for line in out.splitlines()[-3:-1]] == [["2", "4", "2.000"], ["*", "1", "4"]]
    assert out.splitlines()[-1] == "* shortest step: ms=1"
    with open(tmp_path / "rows.json", encoding="utf-8") as file:
        found = json.load(file)
    assert [row["parameters"] for row in found["rows"]] == [{"ms": "2"}, {"ms": "1"}]
    assert not found["complete"]
    assert err == "overlap: interrupted; 2 of 4 points are done\n"


@pytest.mark.slow
def test_an_interrupt_before_the_first_row(process, script):
    child = process("simulate", "--sweep", "ms=3,1", script(INTERRUPTED))
    out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGINT
    assert out.splitlines()[-1] == "  ranks  step ms  exposed  overlap  step time"
    assert err == "overlap: interrupted; 0 of 2 points are done\n"


def test_an_interrupt_inside_a_group(overlap, script):
    text = WORK.replace(
        "    overlap.run(main",
        "    if args.ms == 3: raise BaseExceptionGroup('', [KeyboardInterrupt()])\n    overlap.run(main",
    )
    code, out, err = overlap("simulate", "--sweep", "ms=1,3,2", script(text))
    assert (code, err) == (130, "overlap: interrupted; 1 of 3 points are done\n")
    assert len(out.splitlines()) == len(ASSUMED.splitlines()) + 2


def test_progress_on_a_terminal(overlap, script, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, _, err = overlap("simulate", "--sweep", "ms=1,2", script(WORK))
    assert code == 0
    assert "0/2" in err
    assert "1/2" in err
    assert "ms=2" in err
