"""What-ifs: a run replayed as it was is that run, and with a change it is what the change really brings."""

import argparse
import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given

import topology
from overlap.cli.timeline import fill, main
from overlap.cli.timeline.tables import advice_text
from overlap.cost.select import plan as cost_plan
from overlap.errors import UsageError
from overlap.timeline import Span, median_step, verdict_of, write_trace
from overlap.timeline.replay import prediction
from overlap.timeline.replay.buckets import least_bytes
from overlap.timeline.replay.changes import parse_change
from overlap.timeline.replay.graph import Node, input_compute
from overlap.timeline.replay.inference import graph_of
from overlap.timeline.replay.prediction import AWAITS_LATER, Baseline, _candidates, advise, predict
from overlap.timeline.replay.simulation import run_graph
from overlap.timeline.span import RoleName
from overlap.units import parse_bytes
from tests.properties import one_in
from tests.timeline.made import comm, compute, render_text, timeline_of, traces
from tests.timeline.programs import (
    MIB,
    badly_cut,
    bucketed,
    by_hand,
    data_parallel,
    layered,
    of_our_buckets,
    pipeline,
    run,
    tensor_parallel,
    windowed,
    with_loss,
)

slow = pytest.mark.slow


def times(timeline):
    return sorted((s.rank, s.kind, s.lane, s.name, s.start_ns, s.end_ns) for s in timeline.spans)


@pytest.mark.parametrize("likely", [False, True])
@pytest.mark.parametrize("program", [data_parallel(late_s=2e-3), pytest.param(bucketed(4), marks=slow), pipeline()])
def test_unchanged_it_is_the_run_to_the_nanosecond(program, likely):
    timeline = run(program)
    assert times(run_graph(graph_of(timeline), timeline, likely=likely)) == times(timeline)


def ends_apart():
    """Rank 0 has its part of each of three all-reduces 30, 20 and 10 us before rank 1, and then begins the next."""
    starts, ends = (0, 10, 40), (40, 60, 90)
    return timeline_of(
        *(
            comm(
                rank,
                1000 * (start + rank),
                1000 * (start + 1),
                1000 * (end - (1 - rank) * early),
                seq=seq,
                ranks=(0, 1),
                nbytes=4 * MIB,
            )
            for seq, (start, end, early) in enumerate(zip(starts, ends, (30, 20, 10), strict=True))
            for rank in (0, 1)
        )
    )


@pytest.mark.parametrize("likely", [False, True])
def test_ranks_that_have_their_part_at_different_times_replay_to_the_nanosecond(likely):
    timeline = ends_apart()
    assert times(run_graph(graph_of(timeline), timeline, likely=likely)) == times(timeline)


def test_half_the_bytes_bring_each_rank_its_part_in_half_the_time():
    found = predict(timeline_of(*(s for s in ends_apart().spans if s.info.seq == 0)), [parse_change("bytes=0.5x")])
    assert [(s.rank, s.end_ns) for s in found.timeline.spans] == [(0, 5_500), (1, 20_500)]


def test_a_made_up_timeline_replays_too(training):
    timeline = training(3)
    replayed = run_graph(graph_of(timeline), timeline, likely=False)
    assert times(replayed) == times(timeline)
    assert [s.info.issued_ns for s in replayed.spans if s.info] == [s.info.issued_ns for s in timeline.spans if s.info]


def named(timeline):
    return sorted((s.rank, s.kind, s.lane, s.name) for s in timeline.spans)


@one_in(3)
@given(traces())
def test_nothing_is_lost_where_pieces_of_a_coarse_clock_seem_to_wait_for_each_other(timeline):
    replayed = run_graph(graph_of(timeline), timeline, likely=True)
    assert named(replayed) == named(timeline)


def test_the_input_of_an_operation_is_what_it_began_after_or_what_its_program_awaited_in_the_same_instant():
    work = Node("compute", 5.0, (0,))
    awaited = Node("program", 0.0, (0,), after=[(work, 0.0)])
    called = Node("program", 0.0, (0,), after=[(awaited, 0.0)])
    later = Node("program", 0.0, (0,), after=[(awaited, 3.0)])
    for after, expected in [
        ([(called, 0.0), (work, 0.0)], work),
        ([(awaited, 0.0)], work),
        ([(called, 0.0)], work),
        ([(later, 0.0)], None),
        ([(awaited, 2.0)], None),
        ([], None),
    ]:
        assert input_compute(Node("arrival", 0.0, (0,), after=after)) is expected


def waits_for_each_other():
    """From the third on, each backward is issued just when an earlier bucket has come, though it does not need that."""
    spans = []
    for rank in range(3):
        for layer in range(4):
            begin = 100 * layer
            backward = compute(rank, begin, begin + 100, "backward")
            spans += [
                replace(backward, issued_ns=max(begin - 10, 0)),
                comm(rank, begin + 100, begin + 100, begin + 190, seq=layer, issued=begin),
            ]
    return timeline_of(*spans)


def test_a_gradient_of_a_larger_bucket_does_not_wait_for_that_bucket():
    told = predict(waits_for_each_other(), [parse_change("bucket_bytes=32")]).timeline
    assert named(told) == named(waits_for_each_other())
    assert max(s.end_ns for s in told.spans if s.kind == "compute") == 400
    assert min(s.info.met_ns for s in told.spans if s.info) == 400


def test_cycles_that_would_take_minutes_to_untie_are_refused(monkeypatch):
    monkeypatch.setattr("overlap.timeline.replay.simulation._MAX_CYCLE_NODES", 3)
    with pytest.raises(UsageError, match="too many operations would wait for each other"):
        predict(waits_for_each_other(), [parse_change("bucket_bytes=32")])


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("compute 'backward'=0.5x", data_parallel(), data_parallel(backward_s=5e-4)),
        ("stragglers=none", data_parallel(late_s=2e-3), data_parallel(late_s=2e-3, shared=True)),
        ("bytes=0.5x", data_parallel(mib=64), data_parallel(mib=32)),
        ("awaits=late", data_parallel(mib=16, awaits="each"), data_parallel(mib=16)),
        ("bucket_bytes=16MiB", bucketed(1), bucketed(4)),
        ("bucket_bytes=25MiB", of_our_buckets(1), of_our_buckets(1, bucket_mib=25)),
        pytest.param("bucket_bytes=8MiB", of_our_buckets(4), of_our_buckets(4, bucket_mib=8), marks=slow),
        ("compute 'stage'=0.5x", pipeline(), pipeline(stage_s=5e-4)),
        ("order=forward", layered(mib=32), layered(mib=32, forward=True)),
        ("streams=apart", with_loss(), with_loss(apart=True)),
        ("window=8", windowed(1), windowed(8)),
        pytest.param("window=1", windowed(8), windowed(1), marks=slow),
        pytest.param("compute=2x", data_parallel(), data_parallel(forward_s=4e-3, backward_s=2e-3), marks=slow),
        pytest.param("bucket_bytes=64MiB", bucketed(4), bucketed(16), marks=slow),
        pytest.param("bucket_bytes=4MiB", bucketed(4), bucketed(1), marks=slow),
        pytest.param("bytes=4x", pipeline(), pipeline(mib=8), marks=slow),
    ],
)
def test_a_prediction_is_within_five_percent_of_what_the_change_brings(change, before, after):
    found = predict(run(before), [parse_change(change)])
    really = run(after)
    real_ns = verdict_of(really, step=median_step(really)).wall_ns
    assert abs(found.predicted.wall_ns - real_ns) <= 0.05 * real_ns
    assert found.replayed.wall_ns == found.measured.wall_ns
    assert found.least_ns <= found.predicted.wall_ns <= found.most_ns


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("algorithm=ring", "kangaring", "ring"),
        pytest.param("algorithm=kangaring", "mesh", "kangaring", marks=slow),
        pytest.param("algorithm=mesh", "ring", "mesh", marks=slow),
    ],
)
def test_a_prediction_for_another_algorithm_is_within_five_percent(change, before, after):
    program = layered(mib=32)
    measured = run(program, algorithm=before)
    assert measured.meta["cluster"] == "trn1.32xlarge"
    found, really = predict(measured, [parse_change(change)]), run(program, algorithm=after)
    real_ns = verdict_of(really, step=median_step(really)).wall_ns
    assert abs(found.gain_share) > 0.05
    assert abs(found.predicted.wall_ns - real_ns) <= 0.05 * real_ns


def really_brought(change):
    """The program of `layered(layers=3, mib=64)` with what a piece of advice says."""
    name, _, value = change.partition("=")
    program = {
        "order": lambda: layered(layers=3, mib=64, forward=True),
        "bytes": lambda: layered(layers=3, mib=32),
        "bucket_bytes": lambda: layered(layers=3, mib=64, bucket_mib=parse_bytes(value, argument="size") / 2**20),
        "compute 'backward'": lambda: layered(layers=3, mib=64, backward_s=2.5e-4),
        "algorithm": lambda: layered(layers=3, mib=64),
    }[name]()
    return run(program, algorithm=value if name == "algorithm" else "mesh")


def test_each_piece_of_advice_brings_what_it_says():
    found = advise(run(layered(layers=3, mib=64), algorithm="mesh"))
    assert {one.changes[0].text.partition("=")[0] for one in found} >= {"order", "bytes", "algorithm"}
    for one in found:
        really = really_brought(one.changes[0].text)
        real_ns = verdict_of(really, step=median_step(really)).wall_ns
        assert abs(one.predicted.wall_ns - real_ns) <= 0.05 * real_ns, (one.changes[0].text, real_ns)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [("streams=apart", with_loss(), with_loss(apart=True)), ("window=8", windowed(1), windowed(8))],
)
def test_advice_on_streams_and_windows_brings_what_it_says(change, before, after):
    (one,) = [each for each in advise(run(before)) if each.changes[0].text == change]
    really = run(after)
    real_ns = verdict_of(really, step=median_step(really)).wall_ns
    assert one.gain_share > 0.15
    assert abs(one.predicted.wall_ns - real_ns) <= 0.05 * real_ns


@pytest.mark.slow
def test_one_screen_says_what_to_change_and_the_change_brings_what_was_predicted():
    timeline = run(badly_cut())
    screen = render_text(timeline, step=median_step(timeline), width=80, height=24).splitlines()
    said = " ".join(screen[-3:])
    assert len(screen) <= 24
    assert "waiting for rank 2 (compute 'tokenise' at " in said
    assert "on the wire (all_reduce at " in said
    changes = [each.changes[0].text for each in advise(timeline)]
    assert {"bucket_bytes=25MiB", "stragglers=none"} <= set(changes)
    found = predict(timeline, [parse_change(text) for text in ("bucket_bytes=25MiB", "stragglers=none")])
    really = run(badly_cut(shared=True, head=25 << 20, body=25 << 20))
    real_ns = verdict_of(really, step=median_step(really)).wall_ns
    assert real_ns < 0.8 * found.measured.wall_ns
    assert abs(found.predicted.wall_ns - real_ns) <= 0.05 * real_ns


@pytest.mark.slow
@pytest.mark.parametrize("mib", [pytest.param(1, marks=slow), 4, pytest.param(16, marks=slow), 25])
def test_of_buckets_that_are_too_large_it_shows_when_what_is_in_them_was_there(mib):
    found = predict(run(badly_cut()), [parse_change(f"bucket_bytes={mib}MiB")])
    really = run(badly_cut(head=mib << 20, body=mib << 20))
    real_ns = verdict_of(really, step=median_step(really)).wall_ns
    assert abs(found.predicted.wall_ns - real_ns) <= 0.05 * real_ns


@pytest.mark.slow
def test_of_a_long_run_the_steps_around_the_median_one_tell_the_same():
    timeline = run(layered(mib=32, layers=2, steps=12), ranks=2)
    found = advise(timeline)
    assert len(found) >= 3
    assert {len(one.timeline.steps()) for one in found} == {9}
    for one in found:
        assert one.gain_ns == pytest.approx(predict(timeline, one.changes).gain_ns, rel=0.01)


@pytest.mark.slow
def test_gradients_that_would_fill_the_window_of_their_stream_are_not_foretold():
    """The least urgent, issued first, hold up the most urgent: the run gets longer, or shorter, than a replay knows."""
    timeline = run(layered(layers=12, mib=64, steps=3), ranks=2)
    with pytest.raises(UsageError, match="more than 8 operations of a stream would be under way"):
        predict(timeline, [parse_change("order=forward")])
    assert all(one.changes[0].text != "order=forward" for one in advise(timeline))


def test_of_transfers_of_one_size_the_range_says_that_nobody_knows():
    found = predict(run(data_parallel(mib=32)), [parse_change("bytes=2x")])
    really = verdict_of(run(data_parallel(mib=64)), step=1).wall_ns
    assert found.least_ns < really < found.predicted.wall_ns == found.most_ns


def two_ranks():
    """Rank 1 computes 20 us more; an all-reduce of 1 MiB on both."""
    return timeline_of(
        compute(0, 0, 10_000), compute(1, 0, 10_000), compute(1, 10_000, 30_000, "tokenise"),
        comm(0, 10_000, 30_000, 40_000, ranks=(0, 1), nbytes=4 * MIB),
        comm(1, 30_000, 30_000, 40_000, ranks=(0, 1), nbytes=4 * MIB),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "step_ns"),
    [
        ("compute 'tokenise'=0.5x", 30_000),
        ('compute "tokenise"=0x', 20_000),
        ("compute=0.5x", 25_000),
        ("bandwidth=2x", 35_000),
        ("bytes=3x", 60_000),
        ("latency=5x", 40_000),
        ("stragglers=none", 30_000),
        ("ranks=4", 45_000),
    ],
)
def test_changes_do_what_they_say(change, step_ns):
    assert predict(two_ranks(), [parse_change(change)]).predicted.wall_ns == step_ns


@pytest.mark.parametrize(("change", "step_ns"), [("ranks=4", 70_000), ("latency=5x", 98_000), ("bytes=3x", 50_000)])
def test_what_depends_on_the_size_is_told_from_two_sizes(change, step_ns):
    """Of 10 us for 8 bytes, and 14 us for 24 bytes, 8 us are latency."""
    operations = [
        comm(rank, start, start, end, seq=seq, ranks=(0, 1), nbytes=nbytes)
        for rank in (0, 1)
        for seq, (start, end, nbytes) in enumerate([(10_000, 20_000, 8), (20_000, 34_000, 24)])
    ]
    timeline = timeline_of(compute(0, 0, 10_000), compute(1, 0, 10_000), *operations)
    assert predict(timeline, [parse_change(change)]).predicted.wall_ns == step_ns


def test_work_that_is_shared_out_is_neither_lost_nor_gained():
    """Rank 1 has 17 us to compute, rank 0 has 14; rank 0 alone has a compute that is called `other`."""
    timeline = timeline_of(
        compute(0, 0, 5000, "bwd"), comm(0, 5000, 8000, 8000, ranks=(0, 1)),
        compute(0, 8000, 10_000, "sgd"), compute(0, 10_000, 17_000, "other"),
        compute(1, 0, 8000, "bwd"), comm(1, 8000, 8000, 8000, ranks=(0, 1)), compute(1, 8000, 17_000, "sgd"),
    )  # fmt: skip
    found = predict(timeline, [parse_change("stragglers=none")])
    assert found.predicted.wall_ns >= 15_500
    assert found.predicted.compute_ns == found.measured.compute_ns == 31_000


def test_changes_hold_together():
    found = predict(two_ranks(), [parse_change("compute=0.5x"), parse_change("bandwidth=2x")])
    assert found.predicted.wall_ns == 20_000
    assert str(found) == (
        "with compute=0.5x, bandwidth=2x a step would take 20.0 us (from 20.0 to 25.0) instead of 40.0 us: -50.0%"
    )


@cache
def six_layers():
    return run(layered(mib=4, layers=6, steps=3))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("change", ["bucket_bytes=1MiB", "order=forward", "algorithm=ring"])
@pytest.mark.parametrize("other", ["bandwidth=0.2x", "order=forward"])
def test_the_order_of_two_changes_does_not_matter(change, other):
    changes, timeline = [parse_change(change), parse_change(other)], six_layers()
    found = [predict(timeline, some).predicted.wall_ns for some in (changes, changes[::-1])]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_window_may_come_before_or_after_a_factor():
    changes, timeline = [parse_change("window=2"), parse_change("bandwidth=0.2x")], run(windowed(4))
    found = [predict(timeline, some).predicted.wall_ns for some in (changes, changes[::-1])]
    assert found[0] == found[1]


def test_a_bucket_without_an_end_of_its_own_may_go_first():
    timeline = six_layers()
    slow = parse_change("bandwidth=0.2x")
    cut, forward = parse_change("bucket_bytes=1048576"), parse_change("order=forward")
    both = predict(timeline, [cut, forward, slow])
    assert named(both.timeline) == named(timeline)
    assert both.predicted.wall_ns <= predict(timeline, [cut, slow]).predicted.wall_ns


KNOWN = (
    "names nothing that can change; write bandwidth=2x, latency=0.5x, bytes=0.5x, compute=0.5x, compute 'NAME'=0.5x, "
    "bucket_bytes=4MiB, order=forward, algorithm=ring, ranks=64, stragglers=none, awaits=late, updates=late, "
    "barriers=none, loop=free, streams=apart, or window=4"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=2x", f"--what-if: 'speed=2x': {KNOWN}"),
        ("bandwidth", f"--what-if: 'bandwidth': {KNOWN}"),
        ("order=backward", f"--what-if: 'order=backward': {KNOWN}"),
        (
            "algorithm=ring",
            "--what-if: 'algorithm=ring': the trace does not say on what machine it was recorded; "
            "record it with --cluster",
        ),
        ("awaits=early", f"--what-if: 'awaits=early': {KNOWN}"),
        ("bandwidth=2", "--what-if: 'bandwidth=2': '2' is not a factor; write a number and x, as in 2x or 0.5x"),
        ("bandwidth=0x", "--what-if: 'bandwidth=0x': nothing travels at 0 times the speed; give a factor above 0"),
        ("ranks=one", "--what-if: 'ranks=one': 'one' is not a number of ranks from 2 on"),
        ("window=0", "--what-if: 'window=0': '0' is not a number of operations from 1 on"),
        (
            "streams=apart",
            "--what-if: 'streams=apart': the operations of each line have a stream of their own already; "
            "leave this change out",
        ),
        ("bucket_bytes=0", "--what-if: 'bucket_bytes=0': a bucket holds at least a byte; give 1 or more"),
        (
            "bucket_bytes=x",
            "--what-if: 'bucket_bytes=x': bucket_bytes: 'x' is not a size; write a number and one of B, K, M, G, KiB, "
            "MiB, GiB, kB, MB, GB",
        ),
        (
            "compute 'x'=2x",
            "--what-if: \"compute 'x'=2x\": no compute is called 'x'; there are 'tokenise', 'work'",
        ),
    ],
)
def test_a_change_that_names_nothing_is_one_line(text, message):
    with pytest.raises(UsageError) as caught:
        predict(two_ranks(), [parse_change(text)])
    assert str(caught.value) == message


def test_what_cannot_change_is_one_line():
    with pytest.raises(UsageError) as caught:
        predict(run(layered(forward=True)), [parse_change("order=forward")])
    assert (
        str(caught.value) == "--what-if: 'order=forward': all gradients have priorities already; leave this change out"
    )
    with pytest.raises(UsageError) as caught:
        predict(timeline_of(compute(0, 0, 10)), [parse_change("order=forward")])
    assert (
        str(caught.value)
        == "--what-if: 'order=forward': there are no gradients that could change their order; leave this change out"
    )
    timeline = run(data_parallel(), algorithm="ring")
    for change, message in (
        ("ring", "no operation could become 'ring'; those recorded are 'ring'; leave this change out"),
        ("pairwise", "no operation could become 'pairwise'; those recorded are 'ring'; leave this change out"),
    ):
        with pytest.raises(UsageError) as caught:
            predict(timeline, [parse_change(f"algorithm={change}")])
        assert str(caught.value) == f"--what-if: 'algorithm={change}': {message}"
    timeline.meta["cluster"] = "cray"
    with pytest.raises(UsageError, match=r"^--what-if: 'algorithm=mesh': the machine of the trace is not known here: "):
        predict(timeline, [parse_change("algorithm=mesh")])
    with pytest.raises(UsageError, match=r"^--what-if: 'algorithm=rings': algorithm: 'rings' is unknown; known are "):
        parse_change("algorithm=rings")


@pytest.mark.parametrize(
    ("machine", "ranks", "line"),
    [
        ("dl1.24xlarge x32", 64, '--cluster "dl1.24xlarge x8" train.py'),
        ("dl1.24xlarge x32", 8, '--cluster "dl1.24xlarge" train.py'),
        ("dl1.24xlarge x32", 60, '--cluster "dl1.24xlarge x8" --ranks 60 train.py'),
        ("trn1.32xlarge", 8, '--cluster "trn1.32xlarge" --ranks 8 train.py'),
    ],
)
def test_on_a_machine_that_the_simulator_knows_other_ranks_are_simulated(machine, ranks, line):
    world_size = 256 if "x32" in machine else 4
    timeline = replace(two_ranks(), world_size=world_size, meta={"cluster": machine, "script": "train.py"})
    with pytest.raises(UsageError) as caught:
        predict(timeline, [parse_change(f"ranks={ranks}")])
    assert str(caught.value).endswith(f"run the program there: overlap simulate {line}")


@pytest.mark.parametrize("machine", ["local", "cray"])
def test_on_another_machine_other_ranks_are_a_ring(machine):
    timeline = replace(two_ranks(), meta={"cluster": machine})
    assert predict(timeline, [parse_change("ranks=4")]).predicted.wall_ns == 45_000


@pytest.mark.parametrize("change", ["bandwidth=2x", "bucket_bytes=1MiB", "window=2", "streams=apart"])
def test_without_communication_there_is_none_to_change(change):
    with pytest.raises(UsageError, match=r"there (is no communication that|are no all-reduces that|are no operations)"):
        predict(timeline_of(compute(0, 0, 10)), [parse_change(change)])


def test_advice_is_largest_gain_first_and_true():
    found = advise(run(data_parallel(mib=16, late_s=2e-3, awaits="each")))
    gains = [one.gain_ns for one in found]
    assert gains == sorted(gains, reverse=True)
    assert {one.changes[0].text for one in found} >= {"stragglers=none", "awaits=late", "bytes=0.5x"}
    told = advice_text(found, width=80)
    assert max(map(len, told)) <= 80
    assert advise(timeline_of(compute(0, 0, 10, "it's"))) == []
    assert advice_text([], width=80) == ["nothing that was tried would make the step shorter by half a percent"]


def gradients_and_loss(loss_ns):
    """Of three ranks: gradients of 1 and 4 MiB and of 4 KiB, and the 4 bytes of a loss, from `loss_ns` on."""
    spans = []
    for rank in range(3):
        spans += [compute(rank, 1_000_000 * n, 1_000_000 * (n + 1), "bwd") for n in range(3)]
        for seq, (start_ns, nbytes, site) in enumerate(
            [
                (1_000_000, 1 << 20, "a.py:4"),
                (2_000_000, 4 << 20, "a.py:4"),
                (3_000_000, 4096, "a.py:5"),
                (loss_ns, 4, "a.py:9"),
            ]
        ):
            span_ns = start_ns, start_ns, start_ns + 1_500_000
            spans.append(comm(rank, *span_ns, seq=seq, nbytes=nbytes, site=site))
    return timeline_of(*spans)


@pytest.mark.parametrize(
    ("loss_ns", "told"),
    [
        (4_600_000, "bucket_bytes=8MiB: 3 all_reduces of up to 4 MiB at a.py:4 become buckets in the order"),
        (4_400_000, "bucket_bytes=8MiB: 4 all_reduces of up to 4 MiB at a.py:4 become buckets in the order"),
    ],
)
def test_operations_of_two_lines_share_a_bucket_if_they_are_ever_under_way_together(loss_ns, told):
    timeline = gradients_and_loss(loss_ns)
    said = [f"{change.text}: {change.what}" for change in _candidates(timeline, Baseline(timeline, None))]
    assert [each for each in said if each.startswith(told)]


def test_advice_to_a_program_of_pytorch_is_in_its_words():
    timeline = replace(gradients_and_loss(4_600_000), meta={"torch": "yes"})
    changes = [change.text.partition("=")[0] for change in _candidates(timeline, Baseline(timeline, None))]
    assert not {"order", "streams", "updates"} & set(changes)
    found = [predict(timeline, [parse_change(text)]) for text in ("bucket_bytes=256KiB", "bytes=0.5x")]
    told = " ".join(advice_text(found, width=1000))
    assert "; DistributedDataParallel(..., bucket_cap_mb=0.25), or flatten tensors before all_reduce" in told
    assert "; register_comm_hook of DistributedDataParallel, with bf16_compress_hook or another that sends less" in told


def test_the_advice_on_a_run_in_real_time_says_nothing_of_windows():
    changes = {
        clock: [change.text for change in _candidates(timeline, Baseline(timeline, None))]
        for clock in ("real", "virtual")
        if (timeline := replace(gradients_and_loss(4_600_000), clock=clock))
    }
    assert [text for text in changes["virtual"] if text not in changes["real"]] == ["window=8", "window=2", "window=32"]


@pytest.mark.parametrize(("role", "told"), [("program", True), ("stage", False)])
def test_it_does_not_advise_to_move_the_waits_of_a_pipeline(role, told):
    timeline = awaiting(None)
    spans = [replace(span, role=role) if span.kind == "comm" else span for span in timeline.spans]
    changes = [change.text for change in _candidates(timeline_of(*spans), Baseline(timeline_of(*spans), 0))]
    assert ("awaits=late" in changes) is told


@pytest.mark.parametrize("asked", [["--advise"], ["--what-if", "bandwidth=2x"]], ids=["advise", "what-if"])
@pytest.mark.parametrize(
    "option",
    [
        ["--html", "x.html"], ["--svg", "x.svg"], ["--compare", "b.json"], ["--rank", "0"],
        ["--ops"], ["--stragglers"], ["--critical-path"], ["--all"],
    ],
    ids=lambda option: option[0],
)  # fmt: skip
def test_what_predictions_cannot_do_is_refused(asked, option):
    parser = argparse.ArgumentParser()
    fill(parser)
    with pytest.raises(UsageError) as caught:
        main(parser.parse_args(["run.json", *asked, *option]))
    assert str(caught.value) == (
        f"{asked[0]}, {option[0]}: one or the other; {asked[0]} only prints predictions, of all ranks: run the command "
        f"once more without {asked[0]}"
    )


def test_advice_on_a_changed_run_is_refused():
    parser = argparse.ArgumentParser()
    fill(parser)
    with pytest.raises(UsageError, match=r"^--advise, --what-if: one or the other; "):
        main(parser.parse_args(["run.json", "--advise", "--what-if", "bandwidth=2x"]))


def test_the_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    file = str(tmp_path / "run.json")
    write_trace(two_ranks(), file)
    parser = argparse.ArgumentParser()
    fill(parser)
    assert main(parser.parse_args([file, "--what-if", "bandwidth=2x", "--fail-if", "step < 36us"])) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "bandwidth=2x: wires carry 2 times as much",
        "",
        "mean of a rank/us  measured  replayed  predicted",
        "step                   40.0      40.0       35.0",
        "compute                20.0      20.0       20.0",
        "waiting for ranks      10.0      10.0       10.0",
    ]
    assert lines[-2:] == [
        "with bandwidth=2x a step would take 35.0 us (from 35.0 to 40.0) instead of 40.0",
        "us: -12.5%",
    ]
    assert main(parser.parse_args([file, "--what-if", "bandwidth=2x", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["predicted_ns"] == 35_000
    assert main(parser.parse_args([file, "--advise"])) == 0
    assert capsys.readouterr().out.startswith("the step takes 40.0 us; it would take\n1. 30.0 us (-25.0%)  ")
    assert main(parser.parse_args([file, "--advise", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["advice"][0]["predicted_ns"] == 30_000


def test_no_bucket_is_smaller_than_a_gradient():
    """One gradient from each compute, and one of two computes."""
    timeline = timeline_of(
        compute(0, 0, 10), comm(0, 10, 10, 20, seq=0, nbytes=8 << 20),
        compute(0, 10, 20), compute(0, 20, 30), comm(0, 30, 30, 40, seq=1, nbytes=10 << 20),
    )  # fmt: skip
    assert least_bytes(graph_of(timeline)) == 8 << 20
    sizes = [change.text for change in _candidates(timeline, Baseline(timeline, None)) if "bucket" in change.text]
    assert sizes == ["bucket_bytes=8MiB", "bucket_bytes=25MiB"]  # which holds all, as 100MiB would


def test_a_run_without_barriers():
    timeline = timeline_of(
        compute(0, 0, 10), comm(0, 10, 50, 50, op="barrier", nbytes=0, ranks=(0, 1)), compute(0, 50, 60),
        compute(1, 0, 50), comm(1, 50, 50, 50, op="barrier", nbytes=0, ranks=(0, 1)), compute(1, 50, 60),
    )  # fmt: skip
    found = predict(timeline, [parse_change("barriers=none")])
    assert [end_ns for rank, end_ns in last_ends(found.timeline)] == [20, 60]


def last_ends(timeline):
    return [(rank, max(s.end_ns for s in spans if s.kind == "compute")) for rank, spans in timeline.by_rank().items()]


def test_advice_stops_in_time_and_names_what_is_not_tried(capsys):
    timeline = timeline_of(compute(0, 0, 10), comm(0, 10, 10, 20))
    assert advise(timeline, within_s=-1.0) == []
    told = capsys.readouterr().err
    assert told.startswith("overlap: after -1 s, these are not tried; --what-if tries one: stragglers=none, loop=free")


def test_advice_looks_no_closer_at_a_change_once_its_time_is_over(monkeypatch, capsys):
    """A clock on which each replay takes a second."""
    replays = []

    def run_and_count(*args, **options):
        replays.append(1)
        return run_graph(*args, **options)

    monkeypatch.setattr(prediction, "monotonic", lambda: float(len(replays)))
    monkeypatch.setattr(prediction, "run_graph", run_and_count)
    every = advise(two_ranks())
    texts = [one.changes[0].text for one in every]
    assert len(texts) >= 3
    replays.clear()
    found = advise(two_ranks(), within_s=13.0)
    assert [one.changes[0].text for one in found] == texts[: len(found)]
    assert 1 <= len(found) < len(texts)
    assert len(replays) <= 13
    assert "these gain less and are left out; --what-if tries one: " in capsys.readouterr().err


def many_small(*, wire_ns=1000):
    """One compute makes 60 gradients, and each has a pack, a call and an update: 10 us apart, for 1 us of work."""
    spans, calls_ns = [], range(0, 600_000, 10_000)
    for rank in range(2):
        spans += [replace(compute(rank, 0, 10_000, "backward", "train.py:5"), step=0)]
        for number, at_ns in enumerate(calls_ns):
            begin_ns = 20_000 + at_ns
            pack = compute(rank, begin_ns, begin_ns + 1000, "pack", "train.py:9")
            moving = begin_ns + 1000, begin_ns + 1000, begin_ns + 1000 + wire_ns
            operation = comm(rank, *moving, seq=number, issued=0, ranks=(0, 1), nbytes=1024)
            spans += [replace(pack, issued_ns=0, step=0), replace(operation, name=f"bucket {number}", step=0)]
        for at_ns in calls_ns:
            begin_ns = 630_000 + at_ns
            spans += [replace(compute(rank, begin_ns, begin_ns + 1000, "update", "train.py:7"), issued_ns=0, step=0)]
        spans += [Span(rank=rank, kind="step", lane="step", name="step", start_ns=0, end_ns=1_240_000, step=0)]
    return timeline_of(*spans)


def test_fewer_small_buckets_cost_their_program_less():
    """Left are backward's 10 us, 60 of packs, 60 of updates, 1 of the wire, 19 at the end; of the rest a sixtieth."""
    found = predict(many_small(), [parse_change("bucket_bytes=1MiB")])
    assert found.measured.wall_ns == found.replayed.wall_ns == 1_240_000
    assert found.predicted.wall_ns == 150_000 + 1_031_000 // 60
    assert found.predicted.small is None
    assert found.measured.small is not None


def test_what_small_operations_take_beyond_the_model_each_of_their_buckets_takes():
    """On a known machine a bucket of 60 KiB takes as much more than an operation of 1 KiB as the model says."""
    machine, slow = topology.cluster("trn1.32xlarge", ranks=2), many_small(wire_ns=9000)
    one_ns, all_ns = (cost_plan("all_reduce", n << 10, machine, (0, 1)).predicted_s * 1e9 for n in (1, 60))
    assert one_ns < 9000
    timelines = slow, replace(slow, meta={"cluster": "trn1.32xlarge"})
    walls_ns = [predict(one, [parse_change("bucket_bytes=1MiB")]).predicted.wall_ns for one in timelines]
    assert walls_ns[1] - walls_ns[0] == pytest.approx(all_ns - one_ns, abs=1)


def test_small_operations_gain_nothing_by_fewer_bytes():
    found = predict(many_small(), [parse_change("bytes=0.5x")])
    assert found.least_ns == found.most_ns == found.predicted.wall_ns == found.measured.wall_ns


@pytest.mark.parametrize("change", ["window=4", "bucket_bytes=4MiB"])
def test_what_a_run_does_already_is_no_change(change):
    with pytest.raises(UsageError, match="already"):
        predict(run(windowed(4)), [parse_change(change)])


def awaiting(awaited_ns):
    """Ranks compute 10 us, reduce for 10 more, and compute again: perhaps because they had awaited the sum."""
    spans = []
    for rank in (0, 1):
        operation = comm(rank, 10_000, 10_000, 20_000, ranks=(0, 1), issued=10_000, awaited=awaited_ns, nbytes=4 * MIB)
        spans += [
            replace(compute(rank, 0, 10_000), step=0),
            replace(operation, step=0),
            replace(compute(rank, 20_000, 30_000, "more"), issued_ns=20_000, step=0),
            Span(rank=rank, kind="step", lane="step", name="step", start_ns=0, end_ns=31_000, step=0),
        ]
    return timeline_of(*spans)


def test_only_what_a_program_awaited_can_be_awaited_later():
    """One operation at least was awaited: of the others it is known then that they were not."""
    late = predict(awaiting(12_000), [parse_change("awaits=late")])
    assert late.predicted.wall_ns < late.replayed.wall_ns == 31_000
    one = awaiting(None)
    other = comm(2, 0, 0, 1_000, seq=9, ranks=(2,), awaited=0)
    with pytest.raises(UsageError, match="at the end of the step only already"):
        predict(timeline_of(*one.spans, replace(other, step=0)), [parse_change("awaits=late")])


def test_an_awaited_operation_woke_a_program_rather_than_a_later_one_that_was_not_awaited():
    """The second sum comes before the program goes on after the first; it is over when the program awaits it."""
    spans = awaiting(12_000).spans
    second = [
        replace(comm(rank, 10_000, 10_000, 20_000 - 5, seq=1, ranks=(0, 1), issued=10_000, nbytes=2000), step=0)
        for rank in (0, 1)
    ]
    first = [
        replace(s, end_ns=s.end_ns - 10, info=replace(s.info, end_ns=s.end_ns - 10)) if s.info else s for s in spans
    ]
    late = predict(timeline_of(*first, *second), [parse_change("awaits=late")])
    assert (late.replayed.wall_ns, late.predicted.wall_ns) == (31_000, 21_000)


def wall_ns(timeline):
    return verdict_of(timeline, step=median_step(timeline)).wall_ns


def test_updates_that_hold_up_the_backward_of_the_next_layer_can_be_issued_late():
    timeline, really = run(by_hand()), run(by_hand(updates="after the loop"))
    found = predict(timeline, [parse_change("updates=late")])
    assert found.measured.wall_ns == found.replayed.wall_ns == wall_ns(timeline)
    assert found.predicted.wall_ns == wall_ns(really) == 21_000_000 < wall_ns(timeline)
    advice = next(one for one in advise(timeline) if one.changes[0].text == "updates=late")
    assert advice.gain_ns == found.gain_ns
    places = {s.call_site for s in timeline.spans if s.name == "update"}
    told = " ".join(advice_text([advice], width=1000))
    assert (
        f"updates=late: issue 'update' ({places.pop()}) after the loop, or on a stream of its own: "
        "it waits for all_reduce and holds up 'backward'; "
    ) in told


def test_the_updates_of_a_strategy_are_not_the_programs_to_issue():
    with pytest.raises(UsageError, match="no compute of a step waits for a reduction and holds up others"):
        predict(run(by_hand(name=RoleName("bucket 1", "bucket"))), [parse_change("updates=late")])


def test_operations_of_a_program_that_are_named_like_buckets_are_its_own():
    found = predict(run(by_hand(name="bucket 1")), [parse_change("updates=late")])
    assert found.predicted.wall_ns == wall_ns(run(by_hand(updates="after the loop")))


def test_that_awaits_are_late_already_is_told_with_the_updates_that_are_not():
    with pytest.raises(UsageError) as caught:
        predict(run(by_hand()), [parse_change("awaits=late")])
    assert str(caught.value) == (
        "--what-if: 'awaits=late': programs await communication at the end of the step only already; 'update' waits "
        "for all_reduce and holds up 'backward': see updates=late; leave this change out"
    )


@pytest.mark.parametrize("program", [by_hand(updates="after the loop"), tensor_parallel(), data_parallel()])
def test_computes_that_hold_up_none_or_whose_results_travel_stay(program):
    with pytest.raises(UsageError, match="no compute of a step waits for a reduction and holds up others"):
        predict(run(program), [parse_change("updates=late")])


def test_a_compute_that_was_issued_after_an_update_had_begun_stays_behind_it():
    """The program may have awaited the update."""
    spans = []
    for rank in (0, 1):
        issued_ns = 26_000 if rank else 0
        spans += [
            replace(compute(rank, 0, 10_000, "backward"), issued_ns=0, step=0),
            replace(comm(rank, 10_000, 10_000, 20_000, ranks=(0, 1), issued=0, nbytes=4 * MIB), step=0),
            replace(compute(rank, 20_000, 25_000, "update"), issued_ns=0, step=0),
            replace(compute(rank, max(25_000, issued_ns), 36_000, "backward"), issued_ns=issued_ns, step=0),
        ]
    late = predict(timeline_of(*spans), [parse_change("updates=late")]).timeline
    found = [[(s.name, s.start_ns) for s in late.spans if s.kind == "compute" and s.rank == rank] for rank in (0, 1)]
    assert found == [
        [("backward", 0), ("backward", 10_000), ("update", 21_000)],
        [("backward", 0), ("update", 20_000), ("backward", 26_000)],
    ]


def test_a_step_with_no_more_operations_than_were_active_at_once_shows_no_window():
    """The third one begins when the first is over, as if there had been room for two; but so does a fourth, or none."""
    times_ns = (10_000, 20_000), (12_000, 30_000), (20_000, 40_000)
    spans = [
        comm(rank, start, start, end, seq=seq, issued=9_000, ranks=(0, 1), nbytes=4 * MIB)
        for rank in (0, 1) for seq, (start, end) in enumerate(times_ns)
    ]  # fmt: skip
    assert predict(timeline_of(*spans), [parse_change("window=1")]).replayed.wall_ns == 30_000
    apart = [replace(span, step=span.info.seq // 2) for span in spans]
    with pytest.raises(UsageError, match="at once already"):
        predict(timeline_of(*apart), [parse_change("window=8")])


def test_a_bucket_that_is_awaited_before_it_is_full_is_foretold_with_a_condition():
    timeline = run(data_parallel(mib=8, awaits="each"))
    apart, together = (predict(timeline, [parse_change(f"bucket_bytes={mib}MiB")]) for mib in (4, 20))
    assert not apart.awaits_later
    assert together.awaits_later
    assert AWAITS_LATER in str(together)
    assert AWAITS_LATER in " ".join(advice_text([together], width=1000))


def test_ranks_do_not_wait_in_a_bucket_before_all_its_gradients_are_there():
    found = predict(many_small(), [parse_change("bucket_bytes=1MiB")])
    assert found.predicted.waiting_ns == 0
    assert len({(s.start_ns, s.end_ns) for s in found.timeline.spans if s.kind == "comm"}) == 1


@pytest.mark.slow
def test_advice_tries_buckets_first_where_a_step_has_many_small_ones():
    timeline = many_small()
    assert next(_candidates(timeline, Baseline(timeline, 0))).text == "bucket_bytes=256KiB"
    assert advise(timeline)[0].changes[0].text == "bucket_bytes=256KiB"
