"""Gains that advice promises, of ranks that wait for each other; and changes that it names without a gain."""

import pytest

import overlap
from overlap.explain.bounds import Gain, RankStep, compute_gain
from overlap.timeline import write_trace
from tests.explain.profiles import Recording
from tests.timeline.programs import CHANGES, data_parallel, run


def explained(program, path):
    write_trace(run(program), path)
    return overlap.why(path)


@pytest.mark.parametrize(
    ("program", "cause", "change", "place", "gain"),
    [
        (
            {"awaits": "each"},
            "wire",
            "issue first and await at the end of the step",
            "all_reduce",
            (923_322, 1_231_096),
        ),
        (
            {"mib": 32},
            "wire",
            "issue it earlier, in smaller parts, or send fewer bytes: no later compute could hide it",
            "all_reduce",
            (0, 1_238_044),
        ),
        ({"late_s": 8e-3}, "waiting", "share its work out evenly", "rank 3", (5_313_169, 6_307_774)),
    ],
)
def test_a_trace_of_ours_names_cause_place_change_and_two_gains(tmp_path, program, cause, change, place, gain):
    item = explained(data_parallel(**program), tmp_path / "t.json").advice[0]
    assert item.cause == cause
    assert item.change.startswith(change)
    assert item.place.startswith(place)
    assert (item.gain_least_ns, item.gain_ns, item.gain_most_ns) == (None, *gain)
    assert " if the rest stays, at most " in item.gain_text


def late_rank(tmp_path, extra):
    """Two ranks meet at the end of each step; rank 1 is longer in Python, by other times in each step."""
    for rank in (0, 1):
        rec, start = Recording(rank=rank, world=2), 1_000
        for number, more in enumerate(extra):
            end = start + 6_000 + more
            rec.step(number, start, end)
            rec.kernel(start, start + 1_000, launch=start - 5)
            own = start + 2_000 + more * rank
            rec.frame("train.py(40): log", start + 5, own - 20)
            rec.op("aten::mm", own - 20, own)
            rec.kernel(own, own + 3_000, launch=own - 10)
            arrived = own + 3_000
            rec.collective(arrived, end, launch=arrived - 5)
            start = end
        rec.write(tmp_path / f"rank{rank}.json")
    return overlap.why(tmp_path)


def test_what_a_late_rank_gains_is_what_the_ranks_that_wait_for_it_gain(tmp_path):
    """Without Python, rank 1 has 3.98 and 4.98 ms less to do, and rank 0 has 0.98 ms less: the latter is the limit."""
    found = late_rank(tmp_path, [3_000, 3_000, 4_000])
    (item,) = [item for item in found.advice if item.cause == "python"]
    assert (item.gain_least_ns, item.gain_most_ns) == (3_980_000, 4_980_000)


def test_the_gain_of_a_rank_that_waits_anyway_is_none(tmp_path):
    """Rank 0 loses time in Python while rank 1 is later still: without it, the step is as long."""
    for rank in (0, 1):
        rec = Recording(rank=rank, world=2)
        for number, start in enumerate((1_000, 11_000, 21_000)):
            rec.step(number, start, start + 10_000)
            rec.kernel(start, start + (1_000, 8_000)[rank], launch=start - 5)
            own = start + (5_000, 9_000)[rank]
            if rank == 0:
                rec.frame("train.py(40): log", start + 5, own - 20)
                rec.op("aten::mm", own - 20, own)
                rec.kernel(own, own + 10, launch=own - 10)
                own += 10
            rec.collective(own, start + 10_000, launch=own - 5)
        rec.write(tmp_path / f"rank{rank}.json")
    found = overlap.why(tmp_path)
    assert found.cost_ns("python") > 0.05 * found.step_ns
    assert not [item for item in found.advice if item.cause == "python" and item.gain_least_ns]


def test_the_least_gain_of_a_collection_leaves_out_what_the_profiler_adds_to_it(tmp_path):
    rec = Recording(device="")
    for number, start in enumerate((0, 10_000, 20_000)):
        rec.note(f"ProfilerStep#{number}", start, start + 10_000)
        rec.op("aten::mm", start, start + 4_000)
        rec.frame("<built-in function collect>", start + 4_000, start + 10_000)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    (item,) = found.advice
    assert (item.cause, item.gain_least_ns, item.gain_most_ns) == ("gc", 3_000_000, 6_000_000)
    assert found.verdict.endswith(", -3 ms if the rest stays, at most -6 ms")


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_program_gains(name):
    """At most by the upper bound, and by the other one to a tenth where all else stays: not where operations change."""
    cause, before, after = CHANGES[name]
    old, new = overlap.why(run(before)), overlap.why(run(after))
    assert old.cost_ns(cause) > new.cost_ns(cause)
    gained_ns = old.step_ns - new.step_ns
    (item,) = [item for item in old.advice if item.cause == cause]
    assert 0 < gained_ns <= item.gain_most_ns
    if "bucket" not in name:
        assert abs(item.gain_ns - gained_ns) <= gained_ns // 9


def test_the_bounds_of_a_step_are_worked_out_by_hand():
    """Rank 1 is late by 40: own times of 60 and 100, and 20 in which bytes move, of which 10 are exposed."""
    ranks = [
        RankStep(costs_ns={"compute": 50, "wire": 10, "waiting": 40}, transfer_ns=20, last_ns=5),
        RankStep(costs_ns={"compute": 60, "loop": 30, "wire": 10}, transfer_ns=20, last_ns=5),
    ]
    assert compute_gain(ranks, "waiting") == Gain(stays_ns=20, most_ns=30)
    assert compute_gain(ranks, "wire") == Gain(stays_ns=5, most_ns=10)
    assert compute_gain(ranks, "loop") == Gain(stays_ns=30, most_ns=40)
    assert compute_gain([RankStep(costs_ns={"compute": 5}, transfer_ns=9)], "compute") == Gain(stays_ns=0, most_ns=0)
    both_wait = [RankStep(costs_ns={"compute": own, "loop": 10, "waiting": 30}) for own in (50, 60)]
    assert compute_gain(both_wait, "loop") == Gain(stays_ns=10, most_ns=40)  # for each other, at different times
