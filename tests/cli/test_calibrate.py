"""`overlap calibrate`: logs of every tool become the same rows, and machine files predict what was measured."""

import json
from dataclasses import replace

import pytest

import topology
from overlap.cost.fitting import Launches, Sample, fit, with_shares
from overlap.cost.select import plan
from overlap.errors import UsageError
from overlap.planning.benchmark_logs import read

NCCL = """\
# nccl-tests version 2.19.6
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid   1 on a device  0 [0000:01:00] NVIDIA H100
#  Rank  1 Group  0 Pid   2 on a device  1 [0000:02:00] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    33554432       8388608     float     sum      -1   250.10  134.16  134.16       0   249.80  134.33  134.33       0
    67108864      16777216     float     sum      -1   500.20  134.16  134.16       3   499.60  134.33  134.33       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 134.16
"""
NCCOM = """\
    size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)
      65536           16384    fp32            8.17           8.02           7.77
   33554432    Failure running neuron-bench - log file /tmp/x
"""
OURS = {
    "schema_version": 1,
    "rows": [
        {
            "operation": "all_reduce", "size_bytes": 4096, "dtype": "float32", "ranks": 4,
            "median_ns": 1500.0, "wrong": 0,
        }
    ],
}  # fmt: skip


@pytest.fixture
def log(tmp_path):
    def log(text):
        path = tmp_path / "it.log"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return log


def row_of(found):
    (row,) = found.rows
    return found.tool, row.collective, row.nbytes, row.dtype, row.ranks, row.time_s


def test_every_tool_says_the_same_in_its_own_way(log):
    assert row_of(read(log(NCCL))) == ("nccl-tests", "all_reduce", 33554432, "float32", 2, pytest.approx(250.1e-6))
    assert row_of(read(log(NCCOM), op="allg", ranks=32)) == (
        "nccom-test", "all_gather", 65536, "float32", 32, pytest.approx(8.17e-6),
    )  # fmt: skip
    assert row_of(read(log(json.dumps(OURS)))) == ("overlap bench", "all_reduce", 4096, "float32", 4, 1.5e-6)


def test_what_else_a_job_printed_is_passed_over_and_a_log_that_was_cut_off_is_told(log):
    noisy = NCCL.replace("    33554432", "10.0.0.1: NCCL INFO Connected\nhost:12:12 [0] NCCL INFO x\n    33554432", 1)
    assert len(read(log(noisy)).rows) == 1
    cut = NCCL.replace("# Avg bus bandwidth    : 134.16\n", "")
    assert read(log(cut)).dropped[-1] == "it.log: ends before its average bus bandwidth, so rows may be missing"


def test_wrong_results_and_failures_are_left_out_and_told(log):
    assert read(log(NCCL)).dropped == ("it.log:7: 3 wrong results",)
    assert read(log(NCCOM), op="allg", ranks=32).dropped == ("it.log:3: Failure running neuron-bench",)


def swept(*mebibytes, hosts=2, devices=8, factor=1.0):
    """Return a log of an all-reduce on all devices of some hosts."""
    ranks = [(host, device) for host in range(hosts) for device in range(devices)]
    head = ["# Collective test starting: all_reduce_perf", *(
        f"#  Rank {rank:2} Group  0 Pid {rank} on node{host} device  {device} [0000:01:00] NVIDIA H100"
        for rank, (host, device) in enumerate(ranks)
    ), "#       size         count      type   redop    root     time   algbw   busbw #wrong"]  # fmt: skip
    rows = [(mib << 20, (300 + mib * 5) * factor) for mib in mebibytes]
    return "\n".join([*head, *(
        f"{size} {size // 4} float sum -1 {us} {size / us / 1e3:.5g} 0 0" for size, us in rows
    ), "# Avg bus bandwidth    : 1\n"])  # fmt: skip


def test_a_size_that_a_sweep_leaves_out_is_told(log):
    assert read(log(swept(1, 4, 16, 64, 256))).dropped == ()
    whole = read(log(swept(1, 4, 16, 256, 1024)))
    assert whole.dropped == ("it.log:22: expected 64 MiB after 16 MiB, found 256 MiB: rows are missing",)
    assert read(log(swept(1, 2, 3, 4, 5))).dropped == ()  # by steps, not by a factor


@pytest.mark.slow
def test_ranks_are_where_the_log_says(log, overlap):
    (row, *_) = read(log(swept(1, 4, 16, 64, hosts=2, devices=1))).rows
    assert row.places == ((0, 0), (1, 0))
    for hosts, devices in ((2, 1), (1, 2)):
        slow = log(swept(1, 4, 16, 64, hosts=hosts, devices=devices, factor=10.0))
        out = overlap("calibrate", slow, "--cluster", "dl1.24xlarge x2")[1]
        assert ("All rows cross nodes" in out) is (hosts == 2)


@pytest.mark.slow
def test_names_with_quotes_are_written_as_toml_does(log, overlap, tmp_path):
    path = tmp_path / "own.toml"
    argv = ("--cluster", "p5.48xlarge x2", "--name", 'a "b"\\', "-o", str(path))
    assert overlap("calibrate", log(swept(1, 4, 16, 64, devices=1, factor=10.0)), *argv)[0] == 0
    assert topology.cluster(str(path)).machine.name == 'a "b"\\'


BAD = [
    (
        NCCL.replace("#       size", "#        (B)    (elements)   (ms)  (GB/s)\n#       size"),
        {},
        "it.log:5: expected (B) (GB/s) (elements) (us), found '#        (B)    (elements)   (ms)  (GB/s)'",
    ),
    (
        NCCL.replace("8388608 ", "8388607 "),
        {},
        "it.log:6: expected 8388608 elements of float in 33554432 B, found '8388607'",
    ),
    (NCCL, {"ranks": 8}, "--ranks: it.log says that 2 took part, got 8; leave it out"),
    (
        NCCL,
        {"op": "frob"},
        "--op: expected one of all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter, "
        "got 'frob'",
    ),
    (
        NCCOM.replace("(us)", "(ms)").replace("    algbw(GB/s)    busbw(GB/s)", ""),
        {"op": "allg", "ranks": 32},
        "it.log:2: expected a column of times in (us), found 'time:avg(ms)'",
    ),
    ("hello\n", {}, "it.log: expected the output of nccl-tests, nccom-test or `overlap bench --json`"),
    ("{", {}, "it.log:1: expected JSON of `overlap bench --json`, found no JSON"),
    ("{}", {}, "it.log: expected JSON of `overlap bench --json`, with rows"),
    ('{"rows": [{"operation": "all_reduce"}]}', {}, "it.log: row 0: expected 'size_bytes' beside the others"),
    (
        NCCOM,
        {},
        "it.log: says no collective that is known; give --collective, one of all_gather, all_reduce, "
        "all_to_all, broadcast, gather, reduce, reduce_scatter, scatter",
    ),
    (
        NCCL.replace("250.10", "0.00"),
        {},
        "it.log:6: expected microseconds, more than 0, found '0.00'",
    ),
    (
        NCCL.replace("250.10", "2,5"),
        {},
        "it.log:6: expected microseconds, found '2,5'",
    ),
    (
        NCCL.replace("   250.10  134.16", "   0.2501  134.16"),
        {},
        "it.log:6: expected a bandwidth of 1.342e+05 GB/s (3.35544e+07 bytes in 2.501e-07 s), found '134.16'",
    ),
    (
        NCCL.replace("    33554432 ", "         32M "),
        {},
        "it.log:6: expected a size in whole bytes, found '32M       "
        "8388608     float     sum      -1   250.10  134.16  134.16       0   249.80  134.33  134.33       0'",
    ),
    (
        NCCL.replace("float     sum      -1   250", "floaty    sum      -1   250"),
        {},
        "it.log:6: expected a dtype such as float or bfloat16, found 'floaty'",
    ),
    (
        json.dumps(OURS).replace("1500.0", "-1"),
        {},
        "it.log: row 0: expected median_ns to be a number, more than 0, found -1",
    ),
    (
        json.dumps(OURS).replace("4096", '"4K"'),
        {},
        "it.log: row 0: expected size_bytes to be a number, more than 0, found '4K'",
    ),
    (
        NCCL.replace("  134.16  134.16       0   249.80  134.33  134.33       0", ""),
        {},
        "it.log:6: expected size count type redop root time algbw busbw #wrong, found '33554432       8388608     float"
        "     sum      -1   250.10'",
    ),
]


@pytest.mark.parametrize(("text", "options", "message"), BAD)
def test_a_log_that_makes_no_sense_is_one_line_that_names_the_row(log, text, options, message):
    with pytest.raises(UsageError) as caught:
        read(log(text), **options)
    assert str(caught.value) == message


def test_a_log_that_is_not_there(tmp_path):
    with pytest.raises(UsageError) as caught:
        read(str(tmp_path / "none.log"))
    assert (
        str(caught.value)
        == f"{tmp_path}/none.log: cannot be read: No such file or directory; name the log of a benchmark"
    )


FOUR_RANKS = ("#  Rank  1", "#  Rank  2 x\n#  Rank  3 x\n#  Rank  1")
ONE_RANK = ("#  Rank  1", "#  Rang  1")


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (("", ""), ["local"], "--cluster: 'local' has no wires to fit; name the machine that the log is of"),
        (("", ""), ["trn1.2xlarge", "--ranks", "1"], "--ranks: expected 2 or more, got 1"),
        (("", ""), ["trn1.2xlarge"], "LOG: expected 4 rows or more, found 1"),
        (
            FOUR_RANKS,
            ["trn1.2xlarge"],
            "it.log:8: 4 ranks do not fit trn1.2xlarge, which has 2; name the cluster of the log",
        ),
        (ONE_RANK, ["p5.48xlarge"], "it.log:6: expected a collective of 2 ranks or more, found 1"),
    ],
)
def test_what_cannot_be_fitted(overlap, log, change, words, message):
    path = log(NCCL.replace(*change) if change[0] else NCCL)
    code, out, err = overlap("calibrate", path, "--cluster", *words)
    assert (code, out) == (2, "")
    assert err == f"overlap: {message.replace('LOG', path)}\n"


def test_what_no_cluster_like_it_can_measure(overlap, log):
    fast = log(swept(1, 4, 16, 64, 256, 1024, factor=1e-3))
    found = overlap("calibrate", fast, "--cluster", "p5.48xlarge x2")
    assert found == (
        2, "",
        "overlap: it.log:19: expected 1.31 us or more, half of what 1 MiB on 16 ranks of p5.48xlarge x2 takes at the "
        "full rate of its wires, found 305 ns\n",
    )  # fmt: skip
    apart = log(swept(1, 4, 16, 64, hosts=4, devices=1))
    found = overlap("calibrate", apart, "--cluster", "p5.48xlarge x2")
    assert found == (
        2, "",
        "overlap: it.log:7: expected ranks on at most 2 hosts with 8 devices, as p5.48xlarge x2 has, found 4 with 1\n",
    )  # fmt: skip


LAUNCHES = Launches(inside_s=50e-6, between_s=None)
SIZES = tuple(1 << power for power in range(12, 29, 2))


def samples_of(cluster):
    ranks = tuple(range(cluster.world_size))
    return [
        Sample(
            collective="all_gather",
            nbytes=size,
            dtype="float32",
            ranks=ranks,
            time_s=plan("all_gather", size, cluster).predicted_s,
        )
        for size in SIZES
    ]


@pytest.mark.slow
def test_figures_are_found_again():
    """Times of a machine whose figures are known give these figures, and its left out rows to 1 %."""
    machine = topology.cluster("dl1.24xlarge").machine
    strange = topology.Cluster.of(with_shares(machine, LAUNCHES, {"roce": 0.4}, "made up"))
    found = fit(topology.cluster("dl1.24xlarge"), samples_of(strange))
    assert found.launches == Launches(inside_s=pytest.approx(50e-6, rel=0.05), between_s=None)
    assert found.shares == {"roce": pytest.approx(0.4, rel=0.03)}
    count, median, worst = found.errors(left_out=True)
    assert count == 3
    assert median <= worst <= 0.03


@pytest.mark.slow
def test_what_is_measured_inside_a_node_is_told_apart_from_what_crosses_nodes():
    machine = topology.cluster("p5.48xlarge x2").machine
    launches = Launches(inside_s=30e-6, between_s=300e-6)
    shares = {"nvlink": 0.6, "efa": 0.5}
    strange = replace(topology.cluster("p5.48xlarge x2"), machine=with_shares(machine, launches, shares, "made up"))
    samples = [
        replace(sample, ranks=ranks, time_s=plan("all_gather", sample.nbytes, strange, ranks).predicted_s)
        for sample in samples_of(topology.cluster("p5.48xlarge x2"))[4:]
        for ranks in (tuple(range(8)), tuple(range(16)))
    ]
    found = fit(topology.cluster("p5.48xlarge x2"), samples)
    assert found.launches == Launches(
        inside_s=pytest.approx(30e-6, rel=0.05), between_s=pytest.approx(300e-6, rel=0.05)
    )
    assert found.errors(left_out=True)[2] <= 0.05


def test_from_a_log_to_a_prediction(overlap, tmp_path):
    """One command makes the machine file, and the planner takes it."""
    strange = topology.Cluster.of(
        with_shares(topology.cluster("dl1.24xlarge").machine, LAUNCHES, {"roce": 0.4}, "made up")
    )
    rows = [
        {
            "operation": sample.collective, "size_bytes": sample.nbytes, "dtype": "float32", "ranks": 8,
            "median_ns": sample.time_s * 1e9, "wrong": 0,
        }
        for sample in samples_of(strange)
    ]  # fmt: skip
    log, file = tmp_path / "ours.json", tmp_path / "ours.toml"
    log.write_text(json.dumps({"rows": rows}))
    code, out, err = overlap("calibrate", str(log), "--cluster", "dl1.24xlarge", "-o", str(file))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "rows left out: 3, median error " in out
    machine = topology.cluster(str(file))
    assert machine.name == "ours"
    size = 3 << 20  # that no row has
    expected_s = plan("all_gather", size, strange).predicted_s
    assert plan("all_gather", size, machine).predicted_s == pytest.approx(expected_s, rel=0.03)


def nccl_log(nodes, launch_s=300e-6, bytes_per_s=150e9):
    """What all_reduce_perf prints of nodes with eight ranks each."""
    ranks = 8 * nodes
    head = [
        f"#  Rank {r:2d} Group  0 Pid {r} on host-{r // 8} device  {r % 8} [0000:01:00] NVIDIA H100"
        for r in range(ranks)
    ]
    rows = []
    for power in range(20, 32, 2):
        time_s = launch_s + (1 << power) / bytes_per_s
        rate = f"{(1 << power) / time_s / 1e9:.2f}"
        half = f"{time_s * 1e6:.2f} {rate} {rate} 0"
        rows.append(f"{1 << power:12d} {1 << power - 2:12d} float sum -1 {half} {half}")
    start = "# Collective test starting: all_reduce_perf"
    return "\n".join([start, *head, *rows, "# Avg bus bandwidth    : 1", ""])


@pytest.mark.slow
def test_from_a_log_of_nccl_tests_to_a_training_step_and_how_far_to_trust_it(overlap, log):
    path = log(nccl_log(2))
    code, out, err = overlap("calibrate", path, "--cluster", "p5.48xlarge x2", "-o", "ours.toml")
    assert (code, err) == (0, "")
    assert "rows left out: 2, median error " in out
    assert out.count("All rows cross nodes: nothing was measured of groups inside one.") == 1
    figures = "--tp", "8", "--layers", "2", "--sequence", "1024", "--global-batch", "8"
    code, out, err = overlap("model", "llama-8b", *figures, "--cluster", "ours.toml x2")
    assert (code, err) == (0, "")
    assert out.startswith("llama-8b (1.49 billion parameters) on ours x2, 16 ranks, virtual time\n")
    assert " typical, " in " ".join(out.splitlines()[-3:])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "calibrate: name a LOG and the --cluster that it is of, or --here for this computer, or --published"),
        (
            ("some.log",),
            "calibrate: name a LOG and the --cluster that it is of, or --here for this computer, or --published",
        ),
        (("--here", "some.log"), "--here: measures this computer; got a log too: some.log; leave it out"),
        (("--here", "--cluster", "local"), "--cluster: --here measures this computer; leave it out"),
        (
            ("--between", "mpi", "some.log", "--cluster", "trn2.48xlarge"),
            "--between: only with --here; add that, or leave this out",
        ),
    ],
)
def test_what_does_not_go_with_measuring_here_is_refused(overlap, argv, expected):
    assert overlap("calibrate", *argv) == (2, "", f"overlap: {expected}\n")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_measured_here_becomes_a_machine_that_plans_and_says_its_errors(processes, overlap, monkeypatch):
    from overlap.cli.calibrate import here

    def samples(worlds):
        for world in (each for each in worlds if each.layout.processes <= processes):
            for number, size in enumerate((1024, 65536, 1 << 20, 1 << 24)):
                time_s = (50e-6 + size / 4e9) * world.ranks * world.layout.processes * (1 + 0.05 * (number % 2))
                yield Sample(
                    collective="all_reduce",
                    nbytes=size,
                    ranks=tuple(range(world.ranks)),
                    processes=world.layout.processes,
                    time_s=time_s,
                )

    monkeypatch.setattr(here, "_samples", samples)
    code, out, err = overlap("calibrate", "--here", "-o", "mine.toml")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len([line for line in lines if line.endswith("left out")]) == 2 + processes
    assert max(map(len, lines)) <= 80
    assert f"rows left out: {2 + processes}, median error" in out
    assert overlap("plan", "all_reduce", "--bytes", "1M", "--cluster", "mine.toml x2")[0] == 0
