"""Buckets chosen by replaying recorded steps: what is read off, what the replay says, and what is taken."""

from types import SimpleNamespace

import numpy as np
import pytest
import trio

import overlap
from overlap import parallel
from overlap.parallel import hooks, tuning
from overlap.timeline import Recorder
from overlap.timeline.span import RoleName

from ..core.worlds import TIMEOUT_S
from .programs import train, weights

MS = 1_000_000
SGD = parallel.SGD(0.1)


def make(rank, params, **options):
    return parallel.DataParallel(rank, params, optimizer=SGD, **options)


def recording(count, elements, *, forward_s, layer_s, latency_s, seconds_per_byte):
    names = [f"w{i}" for i in range(count)]
    return tuning.StepRecording(
        sizes=dict.fromkeys(names, (elements, "float32")),
        forward_s=forward_s,
        backward_s=tuple((name, layer_s) for name in reversed(names)),
        latency_s=latency_s,
        seconds_per_byte=seconds_per_byte,
    )


def test_a_step_is_read_off_its_spans():
    recorder, ready = Recorder(0), []
    for step in range(3):
        at = 100 * MS * step
        recorder.append(("compute", "compute", "f", at + 2 * MS, at + 12 * MS, step))
        for layer in range(2):
            start = at + (20 + 10 * layer) * MS
            recorder.append(("compute", "compute", "b", start, start + 6 * MS, step))
        recorder.append(("compute", "compute", RoleName("update", "update"), at + 50 * MS, at + 60 * MS, step))
        meeting = ("all_reduce", "ring", "world", step, 1000, "float32", at + 30 * MS)
        recorder.append(("comm", "comm", "bucket 0", at + 26 * MS, at + 42 * MS, (meeting, at, 0, "", 0, step)))
        ready.append([("b", at + 26 * MS), ("a", at + 36 * MS)])
    small = ("all_gather", "ring", "world", 9, 64, "int64", 0)
    recorder.append(("comm", "comm", "compare", 0, 2 * MS, (small, 0, 0, "", 0, None)))
    found = tuning.read_recording(recorder.spans(), ready, {"a": (1, "float32"), "b": (1, "float32")})
    assert found.backward_s == (("b", 0.006), ("a", 0.006))
    assert found.forward_s == pytest.approx(0.010)  # forward, and b, less what b takes
    assert found.latency_s == 0.002
    assert found.seconds_per_byte == pytest.approx(3 * (12 - 2) / 1000 / 3000)


@pytest.mark.parametrize("name", ["update", "mean", "add", "norm", "pack"])
def test_computes_of_the_program_count_whatever_their_names(name):
    recorder = Recorder(0)
    for step in range(2):
        recorder.append(("compute", "compute", name, 100 * MS * step + 20 * MS, 100 * MS * step + 26 * MS, step))
    ready = [[("a", 26 * MS)], [("a", 126 * MS)]]
    assert tuning.read_recording(recorder.spans(), ready, {"a": (1, "float32")}).forward_s == 0.006


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_spans_have_the_roles_of_who_issued_them(clock):
    """The program's own computes are called as those of the model."""
    seen = []

    async def main(rank):
        model = make(rank, weights(), clip_norm=1.0)
        for name in reversed(list(weights())):
            gradient = rank.compute(np.copy, weights()[name], name="pack", seconds=0.001)
            model.reduce(name, rank.compute(np.copy, gradient, name="update", seconds=0.001))
        model.step()
        await rank.all_reduce(np.zeros(1), name="bucket 0")
        await model.finish()
        seen.extend((span.name, span.role) for span in rank.recorder.spans() if span.kind in ("compute", "comm"))

    overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
    of = {name: {role for each, role in seen if each == name} for name, _ in seen}
    assert of.pop("pack") == {"program", "pack"}
    assert of.pop("update") == {"program", "update"}
    assert of.pop("bucket 0") == {"program", "bucket"}
    assert of.pop("bucket 1", {"bucket"}) == {"bucket"}
    assert set.union(*of.values()) == {"library"}


@pytest.mark.everyday(9)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (parallel.DataParallel, {"clip_norm": 1.0, "compare_every": 1}),
        *((parallel.DataParallel, {"hook": hook}) for hook in (hooks.bfloat16(), hooks.float16())),
        *((parallel.Sharded, {"stage": stage, "clip_norm": 1.0}) for stage in (1, 2, 3)),
        (parallel.LocalSGD, {"period": 2}),
    ],
)  # fmt: skip
def test_nothing_that_a_strategy_issues_is_the_programs(strategy, options):
    async def main(rank):
        params = {name: rank.empty(1 << 19, "f4").reshape(1 << 10, 1 << 9) for name in ("a", "b")}
        model = strategy(rank, params, optimizer=SGD, **options)
        for _ in range(2):
            for name in ("b", "a"):
                model.reduce(name, rank.compute(lambda w: w, model[name], name="mine", seconds=0.001))
            model.step()
        await model.finish()
        return {span.name for span in rank.recorder.spans() if span.role == "program"}

    assert overlap.run(main, ranks=2, clock=overlap.Virtual(shapes_only=True)) == [{"mine"}] * 2


def test_the_wire_is_read_off_as_it_is():
    """Three buckets that queue for the wire, and one alone: each has the latency of its own."""
    known = recording(1, 1, forward_s=0.0, layer_s=0.0, latency_s=0.002, seconds_per_byte=8e-7)
    recorder = Recorder(0)
    small = ("all_gather", "ring", "world", 0, 64, "int64", 0)
    recorder.append(("comm", "comm", "compare", 0, 2 * MS, (small, 0, 0, "", 0, None)))

    async def carried(rank, wire, seq, after_s):
        await trio.sleep(after_s)
        met_ns, bucket = rank.now_ns(), SimpleNamespace(buffer=np.zeros(10_000, np.uint8), priority=0)
        await wire.carry(bucket)
        meeting = ("all_reduce", "ring", "world", seq, 10_000, "uint8", met_ns)
        recorder.append(("comm", "comm", "bucket 0", met_ns, rank.now_ns(), (meeting, met_ns, 0, "", 0, 1)))

    async def main(rank):
        wire = tuning._Wire(known)
        async with trio.open_nursery() as nursery:
            for seq, after_s in enumerate([0.010, 0.011, 0.013, 0.100]):
                nursery.start_soon(carried, rank, wire, seq, after_s)

    overlap.run(main, ranks=1, clock=overlap.Virtual())
    found = tuning.read_recording(recorder.spans(), [[("a", 5 * MS)], [("a", 6 * MS)]], {"a": (1, "float32")})
    assert found.latency_s == known.latency_s
    assert found.seconds_per_byte == pytest.approx(known.seconds_per_byte, rel=1e-12)


def test_the_replay_takes_what_can_be_worked_out_by_hand():
    """Forward 4 ms and backward 4 ms of two layers; each gradient is 8 ms on the wire."""
    known = recording(2, 2500, forward_s=0.004, layer_s=0.002, latency_s=0.0, seconds_per_byte=8e-7)
    fifo = tuning.replay(known, make, 10_000, "fifo")
    # From the end of forward: w1 at 2 ms, on the wire until 10; w0 until 18; then forward.
    assert fifo == pytest.approx(0.018 + 0.004, rel=1e-3)
    together = tuning.replay(known, make, 20_000, "fifo")
    assert together == pytest.approx(0.004 + 0.016 + 0.004, rel=1e-3)


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("known", "size", "order"),
    [
        # 32 gradients of 64 KiB, and every message takes 5 ms: the fewer, the better
        (recording(32, 1 << 14, forward_s=0.02, layer_s=1e-4, latency_s=5e-3, seconds_per_byte=1e-12), None, "forward"),
        # the wire is the limit: small buckets start early
        (
            recording(32, 1 << 16, forward_s=0.03, layer_s=2e-3, latency_s=0.0, seconds_per_byte=1e-8),
            1 << 18,
            "forward",
        ),
    ],
    ids=["latency", "bandwidth"],
)
def test_the_best_candidate_is_taken(known, size, order):
    choice = tuning.choose_candidate(known, make)
    times = [tuning.replay(known, make, *candidate) for candidate in tuning.CANDIDATES]
    assert choice.step_s <= 1.01 * min(times)
    assert choice.default_s == times[0]
    assert tuning.CANDIDATES[choice.candidate] == (size, order)


def test_all_ranks_take_the_same_and_the_first_says_so(capfd):
    models = []

    def auto(rank, **options):
        params = weights(dtype=np.float32)
        models.append(parallel.DataParallel(rank, params, optimizer=SGD, bucket_bytes="auto", exact=True))
        return models[-1]

    def plain(rank):
        return parallel.DataParallel(rank, weights(dtype=np.float32), optimizer=SGD, exact=True)

    async def main(rank, make):
        return await train(rank, make, 8, dtype=np.float32, bound=True)

    found = overlap.run(main, auto, ranks=3, timeout_s=TIMEOUT_S)
    [said] = [line for line in capfd.readouterr().err.splitlines() if "auto" in line]
    assert {f"overlap: {model.choice}" for model in models} == {said}
    expected = overlap.run(main, plain, ranks=3, timeout_s=TIMEOUT_S)[0]
    assert [{name: w.tobytes() for name, w in each.items()} for each in found] == [
        {name: w.tobytes() for name, w in expected.items()}
    ] * 3


def test_the_choice_says_what_it_brings():
    choice = tuning.Choice(candidate=2, step_s=0.2124, default_s=0.2901)
    assert str(choice) == (
        "bucket_bytes='auto' takes buckets of 1 MiB, order='forward': 212 ms a step in the replay, 290 ms with the "
        "defaults"
    )
    assert tuning.Choice.from_array(choice.to_array()) == choice


def test_a_program_that_never_waits_chooses_where_it_ends(capfd):
    """The loop as it is written: eight steps are issued at once, five of them measured."""

    async def main(rank):
        models = []

        def auto(rank):
            models.append(make(rank, weights(), bucket_bytes="auto"))
            return models[0]

        await train(rank, auto, 8)
        first = models[0].choice
        await models[0].finish()
        return first.candidate, models[0].choice is first

    [chosen, other] = overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)
    assert chosen == other
    assert chosen[1]
    assert capfd.readouterr().err.count("bucket_bytes='auto' takes") == 1


def test_the_replays_take_nothing_from_the_settings_of_the_run(monkeypatch, tmp_path):
    """The options of `overlap run` are variables, which win over the arguments of a run, but not of the replays."""
    monkeypatch.setenv("OVERLAP_RANKS", "2")
    monkeypatch.setenv("OVERLAP_TRACE", str(tmp_path / "run.json"))

    async def main(rank):
        model = make(rank, weights(), bucket_bytes="auto")
        await train(rank, lambda _: model, 8)
        return model.choice is not None

    assert overlap.run(main, timeout_s=TIMEOUT_S) == [True, True]
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_fewer_steps_are_not_enough_to_choose():
    async def main(rank):
        models = []

        def auto(rank):
            models.append(make(rank, weights(), bucket_bytes="auto"))
            return models[0]

        await train(rank, auto, 4)
        return models[0].choice

    assert overlap.run(main, ranks=1, timeout_s=TIMEOUT_S) == [None]


def test_ranks_with_fewer_samples_have_nothing_in_common_to_measure():
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            make(rank, weights(), bucket_bytes="auto", uneven=True)
        return str(caught.value)

    assert overlap.run(main, ranks=1, timeout_s=TIMEOUT_S) == [
        "bucket_bytes: 'auto' needs as many steps of all ranks; leave uneven=True out, or try sizes"
    ]


def test_virtual_time_is_nothing_to_measure():
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            make(rank, weights(), bucket_bytes="auto")
        return str(caught.value)

    assert overlap.run(main, ranks=1, clock="virtual") == [
        "bucket_bytes: 'auto' records real time; on the virtual clock, try sizes"
    ]
