"""Computes of a real run, replayed one by one: what each took, and what lay before it."""

import numpy as np
import pytest

from overlap import Conditions, UsageError
from overlap.simulation import Profile
from overlap.timeline.span import Span
from overlap.timeline.spans import Timeline

from ..simulation.worlds import KB, now_ns, simulate


def compute(name, start_ns, end_ns, *, rank=0, issued_ns=0, lane="compute"):
    return Span(rank=rank, kind="compute", lane=lane, name=name, start_ns=start_ns, end_ns=end_ns, issued_ns=issued_ns)


def comm(end_ns, *, rank=0):
    return Span(rank=rank, kind="comm", lane="default", name="x", start_ns=0, end_ns=end_ns)


def replay(*spans, **other):
    timeline = Timeline(spans=sorted(spans, key=lambda span: span.start_ns), world_size=2, **other)
    return Profile.of(timeline, each_call=True)


async def chain(rank):
    """Compute f, f, g and f, one after the other; return when each has ended."""
    ends = []
    for name in "ffgf":
        await rank.compute(int, name=name)
        ends.append(now_ns(rank))
    return ends


def test_each_call_takes_what_it_took_and_begins_as_much_later():
    real = [compute("f", 5, 15), compute("f", 18, 48), compute("g", 50, 57)]
    # No call is left for the third f: it takes the median of f, and what usually lies between.
    assert simulate(chain, 1, profile=replay(*real))[0] == [[10, 43, 52, 52 + 2 + 10]]


def test_ranks_are_replayed_by_themselves():
    real = [compute("f", 0, 10), compute("f", 0, 11, rank=1), compute("g", 0, 0, lane="other")]
    assert [ends[0] for ends in simulate(chain, 2, profile=replay(*real))[0]] == [10, 11]


def test_a_compute_that_waited_for_communication_is_late_by_what_came_after_that():
    real = [compute("f", 0, 10), compute("f", 13, 20), compute("g", 90, 97), comm(80)]
    profile = replay(*real)
    assert profile.replayed.calls[0, "compute", "g"] == ((10, 7),)


def test_a_compute_that_mostly_does_not_wait_has_not_waited():
    starts = (0, 13, 26, 70)
    profile = replay(*(compute("f", start, start + 10) for start in starts), comm(50))
    assert profile.replayed.calls[0, "compute", "f"] == ((0, 10), (3, 10), (3, 10), (34, 10))


def test_a_compute_that_was_issued_late_is_late_by_what_the_program_took():
    profile = replay(compute("f", 0, 10), compute("f", 14, 20), comm(30), compute("g", 90, 97, issued_ns=80))
    assert profile.replayed.calls[0, "compute", "g"] == ((60, 7),)


def test_a_run_of_which_spans_are_missing_cannot_be_replayed():
    with pytest.raises(UsageError) as refused:
        replay(compute("f", 0, 10), dropped=3)
    assert (
        str(refused.value) == "each_call: a timeline lacks 3 spans, which came before the others; leave out each_call"
    )


def test_by_default_all_calls_of_a_name_take_the_same():
    timeline = Timeline(spans=[compute("f", 0, 10), compute("f", 17, 20), compute("g", 30, 34)], world_size=1)
    assert simulate(chain, 1, profile=Profile.of(timeline))[0] == [[3, 6, 10, 13]]


def test_a_run_that_was_simulated_is_replayed_to_the_nanosecond():
    async def main(rank):
        for step in range(5):
            with rank.step(step):
                sums = [rank.all_reduce(rank.compute(np.zeros, KB, seconds=0.001, name="work")) for _ in range(3)]
                rank.compute(len, sums[0], seconds=0.002, name="update")
                await sums[2]
        return now_ns(rank)

    ends, timeline = simulate(main, 4, conditions=Conditions(jitter=0.2))
    assert simulate(main, 4, profile=Profile.of(timeline, each_call=True))[0] == ends
    assert simulate(main, 4, profile=Profile.of(timeline))[0] != ends
