"""A recorded run as a program: on its own cluster it is that run, on a larger one what the program does there."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

import overlap
from overlap.cli.parser import Parser
from overlap.cli.replay import fill, main
from overlap.config import overriding
from overlap.planning import Layout, load, train
from overlap.planning.recorded import classify_ranks, infer_tape, map_growth, play
from overlap.timeline import Span, median_step, merged, read_trace, verdict_of, write_trace
from overlap.timeline.span import RoleName
from overlap.timeline.spans import CUT
from tests.timeline import programs
from tests.timeline.made import comm, compute, timeline_of
from tests.timeline.test_foreign import event, kineto

slow = pytest.mark.slow
COMMAND = sys.modules["overlap.cli.replay"]
RECV = 6
DENSE = replace(load("llama-8b"), name="small", layers=2, sequence=1024)


def recorded(program, *args, ranks=4, cluster="local", efficiency=1.0):
    """Run a program on a modelled machine and return its timeline."""
    seen = []
    with overriding(watcher=seen.append):
        clock = overlap.Virtual(shapes_only=True, efficiency=efficiency)
        overlap.run(program, *args, ranks=ranks, cluster=cluster, clock=clock)
    return seen[0]


def again(timeline, ranks, *, cluster="local", factor=1.0, names=()):
    """Run on so many ranks what was recorded, and return that timeline."""
    tape = infer_tape(timeline)
    return recorded(play, tape, map_growth(tape, ranks, names), factor, ranks=ranks, cluster=cluster)


def spans(timeline):
    return sorted((s.rank, s.kind, s.lane, s.name, s.step, s.start_ns, s.end_ns, place(s)) for s in timeline.spans)


def place(span):
    return span.info.call_site if span.info else span.call_site


def step_ns(timeline):
    return verdict_of(timeline, step=median_step(timeline)).wall_ns


def mixed(stage_s=1e-3):
    """Tensor parallel sums on each layer's way, data parallel ones beside it, on streams of their own."""

    async def program(rank):
        mesh = rank.mesh(dp=rank.world_size // 2, tp=2)
        rank.stream("tp"), rank.stream("dp")
        x, gradient = np.zeros(1 << 20, "f4"), np.zeros(16 << 20, "f4")
        for step in range(3):
            with rank.step(step):
                y, sums = x, []
                for _ in range(3):
                    both = rank.compute(lambda *_: (x, gradient), y, name="layer", seconds=stage_s)
                    y = mesh["tp"].all_reduce(both[0], stream="tp")
                    sums.append(mesh["dp"].all_reduce(both[1], stream="dp"))
                for each in sums:
                    last = rank.compute(lambda *_: None, each, name="update", seconds=1e-4)
                await y
                await last

    return program


def step_of(ranks, cluster, **figures):
    """Two steps of a small model on a cluster, recorded."""
    dp = ranks // (figures.get("tp", 1) * figures.get("pp", 1) * figures.get("cp", 1))
    layout = Layout(dp=dp, global_batch=2 * dp, **figures)
    return recorded(train, DENSE, layout, 2, ranks=ranks, cluster=cluster, efficiency=0.5)


@pytest.mark.parametrize(
    "program",
    [
        programs.data_parallel(late_s=2e-3),
        programs.pipeline(),
        programs.layered(layers=3, forward=True),
        mixed(),
        pytest.param(programs.bucketed(4), marks=slow),
        pytest.param(programs.data_parallel(awaits="each"), marks=slow),
    ],
    ids=["late", "pipeline", "layered", "mixed", "bucketed", "each"],
)
def test_on_its_own_cluster_it_is_what_was_recorded(program):
    timeline = recorded(program)
    assert spans(again(timeline, 4)) == spans(timeline)


@pytest.mark.slow
@pytest.mark.parametrize(
    "figures",
    [{"tp": 2}, pytest.param({"tp": 2, "zero": 3}, marks=slow), pytest.param({"pp": 2, "zero": 2}, marks=slow),
     pytest.param({"cp": 2}, marks=slow)],
    ids=str,
)  # fmt: skip
def test_a_step_of_a_model_takes_the_same_again(figures):
    timeline = step_of(4, "trn2.3xlarge", **figures)
    assert step_ns(again(timeline, 4, cluster="trn2.3xlarge")) == step_ns(timeline)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "program", [programs.data_parallel(), mixed(), pytest.param(programs.layered(), marks=slow)],
    ids=["data parallel", "mixed", "layered"],
)  # fmt: skip
def test_on_more_ranks_it_is_what_the_program_does_there(program):
    assert spans(again(recorded(program), 8)) == spans(recorded(program, ranks=8))


def test_on_fewer_ranks_too():
    assert spans(again(recorded(mixed()), 2)) == spans(recorded(mixed(), ranks=2))


@slow
@pytest.mark.parametrize("figures", [{"tp": 2}, {"tp": 2, "zero": 3}, {"pp": 2, "zero": 0}, {"cp": 2}], ids=str)
def test_a_step_of_a_model_on_two_instances_is_within_three_percent(figures):
    # What no shorter wire had shown to be waited for is missing; a rank's share of ZeRO's update stays as large.
    found = step_ns(again(step_of(4, "trn2.3xlarge", **figures), 8, cluster="trn2.3xlarge x2"))
    really = step_ns(step_of(8, "trn2.3xlarge x2", **figures))
    assert abs(found - really) <= 0.03 * really


def test_computes_take_a_multiple_of_what_they_took():
    faster = again(recorded(mixed()), 4, factor=0.5)
    assert sum(s.duration_ns for s in faster.spans if s.name == "layer") == 4 * 3 * 3 * 500_000


def test_groups_that_do_not_grow_keep_their_ranks_and_those_that_do_have_all_of_their_likes():
    growth = map_growth(infer_tape(recorded(mixed())), 8)
    assert [growth.recorded_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert growth.group(5, "tp", (0, 1)) == (4, 5)
    assert growth.group(5, "dp", (1, 3)) == (1, 3, 5, 7)
    named = map_growth(infer_tape(recorded(mixed())), 8, ["tp"])
    assert [named.recorded_rank(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert named.group(6, "tp", (2, 3)) == (4, 5, 6, 7)
    assert named.group(6, "dp", (0, 2)) == (2, 6)


GPU = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "BFloat16"}


def pytorch(rank):
    """One step of three kernels, the last of which needs the sum of what the first has computed."""
    return kineto(rank, [
        event("user_annotation", "ProfilerStep#1", 0, 1000),
        event("kernel", "gemm", 0, 300, 17),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 300, 500, 19, **GPU),
        event("kernel", "gemm", 300, 200, 17),
        event("kernel", "adam", 800, 200, 17),
    ])  # fmt: skip


def test_a_trace_of_pytorch_is_a_program(tmp_path):
    files = []
    for rank in (0, 1):
        files.append(tmp_path / f"{rank}.json")
        files[-1].write_text(json.dumps(pytorch(rank)))
    timeline = merged([read_trace(file) for file in files])
    found = again(timeline, 4, cluster="trn2.3xlarge")
    seen = [span for span in found.for_rank(3) if span.kind != "step"]
    assert [(s.name, s.start_ns) for s in seen if s.name == "gemm"] == [("gemm", 0), ("gemm", 300_000)]
    sums = next(span for span in seen if span.info)
    assert (sums.info.ranks, sums.info.nbytes, sums.info.dtype) == ((0, 1, 2, 3), 2 << 20, "bfloat16")
    assert sums.start_ns == 300_000
    adam = next(span for span in seen if span.name == "adam")
    assert (adam.start_ns, adam.duration_ns) == (max(sums.end_ns, 500_000), 200_000)


def test_one_rank_of_pytorch_stands_for_all(tmp_path):
    (tmp_path / "0.json").write_text(json.dumps(pytorch(0)))
    found = again(read_trace(tmp_path / "0.json"), 2, cluster="trn2.3xlarge")
    assert len({(s.name, s.start_ns, s.end_ns) for s in found.spans if s.rank == 0}) == len(found.for_rank(1))


def test_a_trace_that_was_cut_off_is_told():
    timeline = timeline_of(compute(0, 0, 10_000))
    tape = infer_tape(replace(timeline, meta={CUT: "only what is complete"}))
    assert "1 file or more was cut off: what is complete of it is taken" in tape.notes


def sizeless(span):
    return span if span.info is None else replace(span, info=replace(span.info, nbytes=0))


def test_what_nobody_can_carry_over_keeps_its_time_and_is_told():
    timeline = timeline_of(
        *(compute(rank, 0, 10_000) for rank in (0, 1)), *(compute(rank, 30_000, 40_000) for rank in (0, 1)),
        *(comm(rank, 10_000, 10_000, 30_000, ranks=(0, 1)) for rank in (0, 1)),
    )  # fmt: skip
    timeline = replace(timeline, world_size=2, spans=[sizeless(span) for span in timeline.spans])
    tape = infer_tape(timeline)
    assert tape.notes == ["2 operations of unknown size keep their recorded time"]
    assert [s.start_ns for s in again(timeline, 2).for_rank(0) if s.kind == "compute"] == [0, 30_000]


def misnamed(axes):
    """Buckets of gradients on the groups of one axis, and sums of a layer on those of the other."""
    outer, inner = axes

    async def program(rank):
        mesh = rank.mesh(**{outer: rank.world_size // 2, inner: 2})
        await mesh[inner].all_reduce(np.zeros(4, "f4"))
        await mesh[outer].all_reduce(np.zeros(8, "f4"), name=RoleName("bucket 0", "bucket"))

    return program


@pytest.mark.parametrize("names", [("stages", "data"), ("one", "other")])
def test_groups_that_carry_buckets_grow_whatever_their_name(names):
    timeline = recorded(misnamed(names))
    assert map_growth(infer_tape(timeline), 8).names == {names[0]}
    assert spans(again(timeline, 8)) == spans(recorded(misnamed(names), ranks=8))


def test_buckets_of_all_ranks_make_every_rank_a_data_parallel_one():
    async def program(rank):
        pair = rank.group([rank.rank // 2 * 2, rank.rank // 2 * 2 + 1], name="0")
        await pair.all_reduce(np.zeros(1 << 20, "f4"))  # more bytes than all ranks move together
        await rank.all_reduce(np.zeros(8, "f4"), name=RoleName("bucket 0", "bucket"))

    growth = map_growth(infer_tape(recorded(program)), 8)
    assert (growth.names, growth.group(5, "0", (0, 1)), growth.group(5, "world", (0, 1, 2, 3))) == (
        frozenset(), (4, 5), tuple(range(8))
    )  # fmt: skip


def pairs():
    """Two groups of two ranks of four, whose name says nothing."""
    spans = [comm(rank, 0, 0, 9, ranks=(rank // 2 * 2, rank // 2 * 2 + 1)) for rank in range(4)]
    named = [replace(span, info=replace(span.info, group="0")) for span in spans]
    return replace(timeline_of(*named), world_size=4)


@pytest.mark.parametrize(
    ("made", "ranks", "names", "message"),
    [
        (lambda: recorded(mixed()), 7, (), "ranks: expected a multiple of 2, which is what is there once, got 7"),
        (
            lambda: recorded(mixed()), 8, ("pp",),
            "--grow: 'pp' is no group of the trace; there are 'dp' (of 2), 'tp' (of 2)",
        ),
        (
            pairs, 8, (),
            "--grow: name the groups that have more ranks on a larger cluster; there are '0' (of 2), and the trace is "
            "of 4 ranks",
        ),
        (timeline_of, 2, (), "a trace with neither compute nor communication is no program; record a run with --trace"),
    ],
    ids=["ranks", "name", "nameless", "empty"],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_one_line(made, ranks, names, message):
    with pytest.raises(overlap.UsageError) as refused:
        map_growth(infer_tape(made()), ranks, names)
    assert str(refused.value) == message


def command(*words):
    parser = Parser()
    fill(parser)
    return main(parser.parse_args(list(words)))


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = str(tmp_path / "run.json")
    write_trace(recorded(mixed()), file)
    assert command("--cluster", "local", "--ranks", "8", "--compute", "2x", file) == 0
    shown = capsys.readouterr().out
    assert "as a program    computes take 2 times what was recorded; groups dp of 2 ranks\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    for words, message in (
        (("--compute", "2", file), "--compute: '2' is not a factor; write a number and x, as in 2x or 0.5x"),
    ):
        with pytest.raises(overlap.UsageError) as refused:
            command(*words)
        assert str(refused.value) == message


@pytest.mark.slow
def test_on_many_ranks_two_of_each_class_run_for_all_and_it_is_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = str(tmp_path / "run.json")
    write_trace(recorded(mixed()), file)
    shown = []
    for most in (10_000_000, 100):
        monkeypatch.setattr(COMMAND, "_MOVES_AT_MOST", most)
        assert command("--cluster", "trn1.32xlarge", "--json-file", str(tmp_path / "found.json"), file) == 0
        shown.append(json.loads((tmp_path / "found.json").read_text())["runs"])
    few = capsys.readouterr().out
    assert "8 of 32 ranks run, two for all that are like one of the trace" in " ".join(few.split())
    everybody, stand_ins = (found[0] for found in shown)
    for figure in ("step_ns", "compute_ns", "comm_ns", "exposed_ns", "queued_ns", "idle_ns"):
        assert everybody[figure] == stand_ins[figure]


def test_of_a_long_run_the_steps_around_the_median_one_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(COMMAND, "_MOVES_AT_MOST", 1)
    file = str(tmp_path / "run.json")
    write_trace(recorded(mixed()), file)
    assert command("--cluster", "local", "--ranks", "8", file) == 0
    assert "4 ranks of local, 1 of 3 steps, the median one" in " ".join(capsys.readouterr().out.split())


def test_messages_are_known_beside_an_event_loop_that_was_kept():
    timeline = recorded(programs.pipeline())
    kept = Span(rank=0, kind="program", lane="program", name="train.py:1", start_ns=0, end_ns=1)
    kinds = [
        sum(move.kind == "message" for moves in infer_tape(each).moves.values() for move in moves)
        for each in (timeline, replace(timeline, spans=[*timeline.spans, kept]))
    ]
    assert kinds == [sum(span.info is not None and span.info.op == "send/recv" for span in timeline.spans)] * 2


def test_ranks_that_send_to_different_places_all_run():
    async def program(rank):
        if rank.rank < 2:
            like = ((4,), "f4")
            await (rank.send(np.zeros(4, "f4"), 1) if rank.rank == 0 else rank.recv(like, 0))
        await rank.all_reduce(np.zeros(8, "f4"))

    class Turned(type(map_growth(infer_tape(recorded(program)), 16))):
        def peer(self, rank, known):
            return (super().peer(rank, known) + 4 * (rank > 8)) % self.ranks

    tape = infer_tape(recorded(program))
    growth = map_growth(tape, 16)
    assert classify_ranks(tape, growth) is not None
    names = ("recorded", "ranks", "degree", "stride", "names", "stand_ins")
    assert classify_ranks(tape, Turned(**{name: getattr(growth, name) for name in names})) is None
