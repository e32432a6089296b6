"""`overlap simulate SCRIPT`: what it sets, measures and prints of one run. Times are exact: the model's own."""

import json
import re
import sys
from itertools import count

import pytest

from overlap.cli.simulate import simulation
from overlap.cli.simulate.page import format_exact_ms
from overlap.cost.select import plan
from overlap.simulation.compute_cost import Profile
from overlap.timeline import read_trace
from topology import cluster

TRAIN = """
import sys
import numpy as np
import overlap

async def main(rank):
    for step in range(3):
        with rank.step(step):
            pending = []
            for _ in range(2):
                gradient = rank.compute(rank.empty, 1 << 20, name="backward", seconds=0.001)
                pending.append(rank.all_reduce(gradient))
            for reduced in pending:
                await reduced

if __name__ == "__main__":
    print("program", *sys.argv[1:])
    overlap.run(main, ranks=3)
"""
MS = 10**6
WHERE = ("--cluster", "trn1.32xlarge", "--ranks", "8")


def all_reduce_ns(name="trn1.32xlarge", ranks=8, **how):
    return round(plan("all_reduce", 1 << 22, cluster(name, ranks=ranks), **how).predicted_s * 1e9)


@pytest.fixture
def simulated(overlap):
    """Return a function that simulates and returns the figures of the runs."""

    def run(*argv):
        code, out, err = overlap("simulate", "--json", *argv)
        assert code == 0, err
        return json.loads(out)["runs"]

    return run


# -- what it prints ----------------------------------------------------------------------------------------------


def test_the_page(overlap, script):
    code, out, err = overlap("simulate", *WHERE, "--width", "60", script(TRAIN), "--epochs", "3")
    assert (code, err) == (0, "")
    comm_ns = all_reduce_ns()
    assert comm_ns < MS
    step_ns = 2 * MS + comm_ns
    page, picture, verdict = re.sub(r"\d+\.\d\d s$", "0.00 s", out, flags=re.MULTILINE).split("\n\n")
    assert page == (
        f"""\
program --epochs 3
trn1.32xlarge, 8 ranks, virtual time
  assumed         computes take what they state, or reach 1
                  of the bfloat16 peak and 1 of the memory's
                  bandwidth; Peer Direct; no jitter, no
                  stragglers, no slow wires; compute and
                  communication do not slow each other down
  step time       {format_exact_ms(step_ns)}, the median one of 3 (step 1),
                  of rank 0, the longest
    compute       2.000000 ms
    communication {format_exact_ms(2 * comm_ns)}
      hidden      {format_exact_ms(comm_ns)}, overlap ratio 50.0%
      exposed     {format_exact_ms(comm_ns)}, {comm_ns / step_ns:.1%} of the step
    idle          0.000000 ms
  extrapolated    1 of 1 kinds of communication: all_reduce
                  of 4 MiB float32 on 8 ranks
  simulated in    0.00 s"""
    )
    lines = picture.splitlines()
    assert lines[:2] == ["step 1: 8 of 8 ranks, virtual time; ranks in one row are", "equal"]
    assert lines[2].startswith("8 like 3 compute │█████")
    assert verdict.startswith(f"step {step_ns / 1e3:.4g} us: compute 2000, exposed ")
    assert all(len(line) <= 60 for line in [*lines, *verdict.splitlines()])


@pytest.mark.parametrize(
    ("options", "cost", "told"),
    [
        ((), "flops=1e9", True),
        ((), "seconds=0.001", False),
        (("--dtype", "float32"), "flops=1e9", False),
        (("--dtype", "fp32"), "flops=1e9", False),
    ],
)
def test_arrays_of_another_dtype_than_the_peak_are_told(overlap, script, options, cost, told):
    out = overlap("simulate", *WHERE, *options, script(TRAIN.replace("seconds=0.001", cost)))[1]
    assert ("; arrays are float32: --dtype float32 takes the peak of that" in " ".join(out.split())) is told


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ((), "; if they all do equal work, --shapes-only --alike 1 runs two of them for all"),
        (("--shapes-only",), "; if they all do equal work, --alike 1 runs two of them for all"),
        (("--alike", "1"), ""),
        (("--jitter", "0.1"), ""),
    ],
)
def test_a_slow_simulation_tells_how_far_it_is(overlap, script, monkeypatch, options, hint):
    monkeypatch.setattr(simulation, "monotonic", map(float, count(0, 3)).__next__)
    code, _, err = overlap("simulate", *WHERE, *options, script(TRAIN))
    assert code == 0
    first, *others = err.splitlines()
    assert first == f"overlap: simulating 8 ranks: 0 ns of virtual time, step 0 has begun{hint}"
    told = [
        re.fullmatch(r"overlap: simulating 8 ranks: (.*) of virtual time, step ([012]) has begun", x) for x in others
    ]
    assert {each[2] for each in told} == {"0", "1", "2"}


def test_what_was_published_is_no_extrapolation(overlap, script):
    text = TRAIN.replace("1 << 20", "1 << 22").replace("rank.all_reduce(gradient)", "rank.reduce_scatter(gradient)")
    once = text.replace("range(3)", "range(1)").replace("range(2)", "range(1)")  # 64 ranks of 16 MiB each are enough
    out = overlap("simulate", "--cluster", "trn2.48xlarge", script(once))[1]
    assert "  extrapolated    nothing: all communication lies within published" in out


@pytest.mark.slow
def test_what_is_not_set_is_the_programs(overlap, script):
    own = "clock=overlap.Virtual(efficiency=0.5, conditions=overlap.Conditions(jitter=0.1, seed=3))"
    small = TRAIN.replace("1 << 20", "1 << 10")
    text = script(small.replace("ranks=3", f"ranks=8, cluster='trn1.32xlarge', algorithm='ring', {own}"))

    def told(*options):
        lines = overlap("simulate", *options, text)[1].split("step time")[0].splitlines()[1:]
        return " ".join(line.strip() for line in lines).strip()

    rest = "1 of the memory's bandwidth; Peer Direct; ring wherever it exists; computes vary by exp(0.1 z); seed"
    same = "compute and communication do not slow each other down"
    reach = "computes take what they state, or reach"
    assert told() == (
        f"trn1.32xlarge, 8 ranks, virtual time assumed         {reach} 0.5 of the bfloat16 peak and {rest} 3; {same}"
    )
    assert told("--efficiency", "0.25", "--seed", "4", "--nodes", "2") == (
        f"trn1.32xlarge x2, 64 ranks, virtual time assumed         "
        f"{reach} 0.25 of the bfloat16 peak and {rest} 4; {same}"
    )
    assert told("--ranks", "16").startswith("trn1.32xlarge, 16 ranks, virtual time assumed")
    assert told("--cluster", "trn2.48xlarge", "--lnc", "1").startswith("trn2.48xlarge lnc=1, 128 ranks, ")
    assert told("--cluster", "local").startswith("local, 8 ranks, ")
    script(small.replace("ranks=3", "ranks=4"))
    assert told("--nodes", "2").startswith("local x2, 4 ranks, ")


def test_without_steps_it_is_the_whole_run_and_may_have_no_communication(overlap, script):
    text = (
        "import overlap\n"
        "async def main(rank):\n"
        "    await rank.compute(int, name='work', seconds=rank.rank * 1e-3)\n"
        "overlap.run(main)\n"
    )
    out = overlap("simulate", "--cluster", "local", "--ranks", "3", script(text))[1]
    assert "  step time       2.000000 ms, the whole run, of rank 2, the longest\n    compute       2.000" in out
    assert "overlap ratio n/a" in out
    assert "  extrapolated    nothing: there is no communication\n" in out


def test_each_run_of_a_program_has_its_page(overlap, script):
    text = script(TRAIN.replace("ranks=3", "cluster='trn1.2xlarge'") + "    overlap.run(main, cluster='inf2.xlarge')\n")
    out = overlap("simulate", text)[1]
    assert [line for line in out.splitlines() if "virtual time" in line][::2] == [
        "trn1.2xlarge, 2 ranks, virtual time",
        "inf2.xlarge, 2 ranks, virtual time",
    ]
    assert [line for line in out.splitlines() if line.startswith("run ")] == ["run 1 of 2", "run 2 of 2"]
    assert out.count("  step time       ") == 2


def test_what_is_not_perfect_is_told(overlap, script):
    conditions = "straggler_share=0.5, straggler_factor=1.5, slow_wire_share=0.25, slow_wire_factor=0.5"
    interference = "compute={'seconds': 1.2}, communication={'*': 2}"
    clock = f"conditions=overlap.Conditions({conditions}), interference=overlap.Interference({interference})"
    text = script(TRAIN.replace("ranks=3", f"ranks=3, clock=overlap.Virtual({clock})"))
    options = ("--jitter", "0.05", "--seed", "7", "--no-peer-direct", "--algorithm", "ring")
    out = overlap("simulate", *WHERE, *options, text)[1]
    told = " ".join(line.strip() for line in out.splitlines())
    assert (
        "copies through the host; ring wherever it exists; computes vary by exp(0.05 z); 0.5 of the ranks compute 1.5 "
        "times as long; 0.25 of the wires have 0.5 of their bandwidth left; seed 7; compute (seconds) x1.2 while its "
        "rank communicates; * x2 while its ranks compute" in told
    )


def test_what_goes_wrong_is_told_and_how_to_see_it_again(overlap, script):
    text = TRAIN.replace("ranks=3", "ranks=3, clock=overlap.Virtual(faults=overlap.Faults(death=0.0, loss=0.0))")
    code, out, _ = overlap("simulate", "--fault-seed", "3", script(text))
    assert code == 0
    told = " ".join(line.strip() for line in out.splitlines())
    assert "; faults are planned by Faults(seed=3, loss=0.0, death=0.0); compute and" in told
    code, _, err = overlap("simulate", "--fault-seed", "3", script(text.replace("death=0.0", "death=1.0")))
    assert code == 1
    *_, last, again = err.splitlines()
    assert re.match(
        r"overlap: rank \d failed: PeerLostError: rank \d died at .*, planned by Faults\(seed=3, loss=0", last
    )
    assert again == "  the same again: clock=overlap.Virtual(faults=overlap.Faults(seed=3, loss=0.0, death=1.0))"


def test_ascii(overlap, script):
    out = overlap("simulate", "--ascii", *WHERE, script(TRAIN))[1]
    assert out.isascii()
    assert "8 like 3 compute |####" in out


# -- what it measures --------------------------------------------------------------------------------------------


def test_figures_are_exact_and_add_up(simulated, script):
    [run] = simulated(*WHERE, script(TRAIN))
    comm_ns = all_reduce_ns()
    assert run["step_ns"] == 2 * MS + comm_ns
    assert (run["compute_ns"], run["comm_ns"], run["overlapped_ns"]) == (2 * MS, 2 * comm_ns, comm_ns)
    assert run["step_ns"] == run["compute_ns"] + run["exposed_ns"] + run["idle_ns"]
    assert (run["world_size"], run["steps"], run["overlap_ratio"]) == (8, 3, 0.5)


def test_the_same_again_is_the_same_and_another_seed_is_not(simulated, script):
    def run(seed):
        return simulated(*WHERE, "--jitter", "0.1", "--seed", seed, script(TRAIN))

    assert run("1") == run("1")
    assert run("1") != run("2")


def test_the_longest_rank_is_the_one_that_is_measured(simulated, script):
    text = TRAIN.replace("seconds=0.001", "seconds=0.001 * (1 + (rank.rank == 5))").replace("await reduced", "pass")
    [run] = simulated(*WHERE, script(text.replace("pending.append(rank.all_reduce(gradient))", "await gradient")))
    assert (run["rank"], run["step_ns"], run["compute_ns"]) == (5, 4 * MS, 4 * MS)


def test_computes_by_the_roofline(simulated, script):
    text = TRAIN.replace("seconds=0.001", "flops=1e10")
    peak = cluster("trn1.32xlarge").flops_per_s("bf16")
    for efficiency in (1.0, 0.25):
        [run] = simulated(*WHERE, "--efficiency", str(efficiency), script(text))
        assert run["compute_ns"] == 2 * round(1e10 / (peak * efficiency) * 1e9)
    [run] = simulated(*WHERE, "--dtype", "float32", script(text))
    assert run["compute_ns"] == 2 * round(1e10 / cluster("trn1.32xlarge").flops_per_s("fp32") * 1e9)
    text = TRAIN.replace("seconds=0.001", "bytes_moved=1e8")
    [run] = simulated(*WHERE, "--memory-efficiency", "0.5", script(text))
    assert run["compute_ns"] == 2 * round(1e8 / (cluster("trn1.32xlarge").memory_bytes_per_s() * 0.5) * 1e9)


def test_computes_by_a_profile_of_a_real_run(overlap, simulated, script):
    assert overlap("run", "--ranks", "2", "--trace", "real.json", script(TRAIN))[0] == 0
    text = TRAIN.replace(", seconds=0.001", "")
    text = text.replace("ranks=3", "ranks=3, clock=overlap.Virtual(profile='real.json')")
    [run] = simulated(*WHERE, script(text))
    assert run["compute_ns"] == 2 * Profile.read("real.json").median_ns["backward"]


@pytest.mark.slow
def test_peer_direct(simulated, script):
    times = {}
    for option, peer_direct in (("--peer-direct", True), ("--no-peer-direct", False)):
        [run] = simulated("--cluster", "dl1.24xlarge", "--nodes", "2", option, script(TRAIN))
        times[peer_direct] = run["step_ns"]
        assert run["step_ns"] == 2 * MS + all_reduce_ns(name="dl1.24xlarge x2", ranks=16, peer_direct=peer_direct)
    assert times[False] > times[True]


def test_one_algorithm_wherever_it_exists(simulated, script, monkeypatch):
    [run] = simulated(*WHERE, "--algorithm", "ring", script(TRAIN.replace("range(3)", "range(1)")))
    assert run["step_ns"] == 2 * MS + all_reduce_ns(algorithm="ring") != 2 * MS + all_reduce_ns()
    monkeypatch.setenv("OVERLAP_ALGORITHM", "direct")
    assert simulated(*WHERE, "--algorithm", "ring", script(TRAIN.replace("range(3)", "range(1)"))) == [run]


def test_shapes_only(overlap, script):
    text = TRAIN.replace("1 << 20", "10**12").replace("ranks=3", "ranks=2")
    code, out, _ = overlap("simulate", *WHERE, "--shapes-only", script(text))
    assert code == 0
    assert "all_reduce of 3.638 TiB float32 on 8 ranks" in out


def test_few_ranks_run_for_all(overlap, simulated, script):
    everybody, few = (simulated(*WHERE, "--shapes-only", *alike, script(TRAIN)) for alike in ((), ("--alike", "1")))
    assert few == everybody
    code, out, _ = overlap("simulate", *WHERE, "--alike", "2", script(TRAIN.replace("1 << 20", "10**12")))
    assert code == 0
    assert "shapes only; ranks of each of 2 blocks behave alike, and two of them run for all" in " ".join(out.split())


def test_ranks_that_are_not_alike(overlap, script):
    code, _, err = overlap(
        "simulate", *WHERE, "--alike", "1", script(TRAIN.replace("range(2)", "range(1 + rank.rank % 2)"))
    )
    assert code == 1
    assert "ranks 0 and 7 were said to behave alike" in err
    code, _, err = overlap("simulate", *WHERE, "--alike", "3", script(TRAIN))
    assert code == 2
    assert err.endswith(": alike: 8 ranks do not fall into 3 equal blocks; choose a divisor\n")


def test_what_is_communicated(simulated, script):
    text = TRAIN.replace("await reduced", "await reduced; await rank.barrier(); await rank.all_gather(np.zeros(2**20))")
    [run] = simulated(*WHERE, "--shapes-only", script(text))
    assert [shape["op"] for shape in run["communicated"]] == ["all_gather", "all_reduce", "barrier"]
    assert run["communicated"][0] == {"op": "all_gather", "nbytes": 2**26, "dtype": "float64", "ranks": 8}


# -- programs ----------------------------------------------------------------------------------------------------


def test_json_is_all_that_stdout_gets(overlap, script):
    code, out, err = overlap("simulate", *WHERE, "--json", script(TRAIN), "a")
    assert (code, err) == (0, "program a\n")
    found = json.loads(out)
    assert (found["schema_version"], found["meta"][0]["script"]) == (2, "train.py")


def test_the_trace(overlap, script):
    code, _, err = overlap("simulate", *WHERE, "--trace", "sim.json", script(TRAIN))
    assert code == 0
    assert err.startswith("overlap: trace in sim.json; look at it with `overlap timeline sim.json`")
    timeline = read_trace("sim.json")
    assert (timeline.clock, timeline.world_size, timeline.steps()) == ("virtual", 8, [0, 1, 2])


def test_a_module_and_its_arguments(overlap, script):
    script(TRAIN, "simulated_module.py")
    before = sys.argv[:], sys.path[:]
    code, out, _ = overlap("simulate", *WHERE, "-m", "simulated_module", "--ranks", "7")
    assert (code, out.splitlines()[:2]) == (0, ["program --ranks 7", "trn1.32xlarge, 8 ranks, virtual time"])
    assert (sys.argv, sys.path) == before


def test_a_program_gets_its_state_folder(overlap, script, tmp_path):
    text = TRAIN.replace("    for step", "    print(await rank.state.latest(), rank.state.folder)\n    for step", 1)
    code, out, err = overlap("simulate", "--state-dir", "state", script(text.replace("ranks=3", "ranks=1")))
    assert (code, out.splitlines()[1]) == (0, f"None {tmp_path / 'state'}"), err
    assert not (tmp_path / "state").exists()


def test_a_program_that_exits_in_peace(overlap, script):
    code, out, _ = overlap("simulate", *WHERE, script(TRAIN + "    sys.exit(0)\n"))
    assert code == 0
    assert "  step time       " in out
    assert overlap("simulate", *WHERE, script(TRAIN + "    sys.exit(3)\n"))[0] == 3


def test_a_program_that_fails(overlap, script):
    code, out, err = overlap("simulate", *WHERE, script(TRAIN.replace("for _ in range(2)", "for _ in 1 / 0")))
    assert (code, out) == (1, "program\n")
    assert err.splitlines()[-1].startswith("overlap: rank 0 failed at train.py:10: ZeroDivisionError")


def test_a_compute_without_a_cost(overlap, script):
    code, _, err = overlap("simulate", *WHERE, script(TRAIN.replace(", seconds=0.001", "")))
    assert code == 1
    assert "compute 'backward' has no cost on the virtual clock" in err.splitlines()[-1]
    assert " writes it: clock=overlap.Virtual(profile=TRACE); also" in err


def test_a_deadlock_ends_at_once(overlap, script):
    text = TRAIN.replace("await reduced", "await (reduced if rank.rank else rank.recv(np.empty(1), 1))")
    code, _, err = overlap("simulate", *WHERE, script(text))
    assert code == 1
    told = "every rank is blocked, and nothing is due: ranks 0-1 wait for each other and cannot go on: rank 0 in "
    assert f"overlap: the world cannot finish: {told}" in err
    assert "\n  rank 0: " in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 +", "simulate: train.py:1: not Python: invalid syntax"),
        ("pass", "the program did not call overlap.run, so there is nothing in virtual time"),
    ],
)
def test_programs_that_cannot_be_meant(overlap, script, text, message):
    code, _, err = overlap("simulate", *WHERE, script(text))
    assert code == 2
    assert message in err


def test_no_program(overlap):
    assert overlap("simulate")[2].startswith(
        "overlap: simulate: name a SCRIPT, or -m MODULE (`overlap simulate --help`"
    )
    assert (
        overlap("simulate", "gone.py")[2]
        == "overlap: simulate: gone.py: No such file or directory; name a script that can be read\n"
    )
    assert overlap("simulate", "-m", "no_such_module")[2].startswith("overlap: simulate: -m no_such_module: there")


def test_help_all_has_every_option(overlap):
    short, full = overlap("simulate", "--help")[1], overlap("simulate", "--help-all")[1]
    options = [set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (short, full)]
    assert options[0] < options[1]
    assert "--cluster" in options[0]
    assert "--memory-efficiency" in options[1] - options[0]
