"""Flows that share, against times computed by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.simulation import sharing
from overlap.simulation.flow import Flow, FlowSection, quantise_shares
from overlap.simulation.fluid import Fluid
from overlap.simulation.sharing import Rates, fair_rates


def flow(name, marks_ns, needs, **turn):
    """`needs` says which resources, by number, and how much of each; or so by the ends of sections."""
    marks = [marks_ns] if isinstance(marks_ns, int) else marks_ns
    sections = needs if any(isinstance(each, dict) for each in needs.values()) else {marks[-1]: needs}
    return Flow((name,), marks, [section(end_ns, each) for end_ns, each in sections.items()], **turn)


def section(end_ns, needs):
    """`needs` may be pairs, of how much and in how many messages."""
    both = np.array([each if isinstance(each, tuple) else (each, 1) for each in needs.values()], np.float64)
    shares, messages = both.reshape(-1, 2).T
    return FlowSection.of(end_ns, np.array([*needs], np.int64), quantise_shares(shares), messages)


def play(*starts, caps=()):
    """Run flows given as (start_ns, flow), and caps as (time_ns, flow, cap); return when each mark was reached."""
    fluid, reached, now_ns, todo = Fluid(), {}, 0, sorted({time for time, *_ in (*starts, *caps)})
    while True:
        next_ns = fluid.update_rates(now_ns)
        due = [time for time in (next_ns, *todo[:1]) if time is not None]
        if not due:
            break
        now_ns = min(due)
        for each, _ in fluid.advance_to(now_ns):
            reached.setdefault(each.key[0], []).append(now_ns)
        if todo[:1] == [now_ns]:
            del todo[0]
            fluid.start_flows(now_ns, [each for time, each in starts if time == now_ns])
            for time, each, cap in caps:
                if time == now_ns:
                    fluid.cap_rate(each, cap)
    assert not fluid.flows
    assert not any(fluid.loads.values()), "what was added to resources was taken away again, exactly"
    return {name: times[0] if len(times) == 1 else times for name, times in reached.items()}


def test_a_flow_leaves_a_resource_with_its_stage():
    """Each is on the wire for 30 ns and under way for 20 more: the second waits for the first, not for its end."""
    staged = {30: {1: 1.0}, 50: {}}
    first, second = (flow(name, 50, staged, lane="stream") for name in "ab")
    assert play((0, first), (0, second)) == {"a": 50, "b": 80}


def test_flows_on_different_wires_in_each_stage_follow_each_other():
    """Two hops of 40 ns: the second flow is on the first wire while the first is on the second."""
    staged = {40: {1: 1.0}, 80: {2: 1.0}}
    three = [flow(name, 80, staged, lane="stream") for name in "abc"]
    assert play(*((0, each) for each in three)) == {"a": 80, "b": 120, "c": 160}


def test_equals_share_a_stage_and_then_get_on_alone():
    first, second = (flow(name, [10, 50], {20: {1: 1.0}, 50: {}}) for name in "ab")
    assert play((0, first), (0, second)) == {"a": [20, 70], "b": [20, 70]}


def test_a_cap_holds_through_all_stages():
    one = flow("a", 60, {20: {1: 1.0}, 40: {}, 60: {1: 0.5}})
    assert play((0, one), caps=[(10, one, 0.5)]) == {"a": 110}


def test_alone_it_takes_its_time():
    assert play((7, flow("a", 123_456_789_012_345, {0: 0.3, 5: 1.0}))) == {"a": 123_456_789_012_352}


def test_two_on_one_wire_take_twice_as_long():
    assert play((0, flow("a", 100, {0: 1.0})), (0, flow("b", 100, {0: 1.0}))) == {"a": 200, "b": 200}


def test_on_wires_of_their_own_they_do_not():
    assert play((0, flow("a", 100, {0: 1.0})), (0, flow("b", 100, {1: 1.0}))) == {"a": 100, "b": 100}


def test_what_fits_side_by_side_is_not_slowed():
    assert play((0, flow("a", 100, {0: 0.5})), (0, flow("b", 80, {0: 0.5}))) == {"a": 100, "b": 80}


def test_a_short_one_in_the_middle_of_a_long_one():
    # From 30 on at half speed: b needs 40 for its 20; then a has 50 of its 100 left.
    assert play((0, flow("a", 100, {0: 1.0})), (30, flow("b", 20, {0: 1.0}))) == {"b": 70, "a": 120}


def test_three_with_different_shares():
    # Each may take a third; b takes only its quarter, a and c 3/8 each. So c is at 3/4 speed and a at 3/8.
    # At 100 b is done, c at 75, a at 37.5. Then half each: c at full speed until 125, a at half speed, at 50 by then.
    found = play((0, flow("a", 100, {0: 1.0})), (0, flow("b", 100, {0: 0.25})), (0, flow("c", 100, {0: 0.5})))
    assert found == {"b": 100, "c": 125, "a": 175}


def test_what_one_wire_holds_back_leaves_room_on_another():
    # a and b halve wire 0. On wire 1 b takes that half, and c, which wants 3/4, gets the other: 2/3 speed.
    found = play((0, flow("a", 100, {0: 1.0})), (0, flow("b", 100, {0: 1.0, 1: 1.0})), (0, flow("c", 100, {1: 0.75})))
    assert found == {"a": 200, "b": 200, "c": 150}


def test_a_wire_is_shared_by_message():
    # Three messages of b beside one of a: b has 3/4 of the wire until it is done at 80. Then a has 80 left.
    assert play((0, flow("a", 100, {0: 1.0})), (0, flow("b", 60, {0: (1.0, 3)}))) == {"b": 80, "a": 160}


def test_messages_that_are_held_back_elsewhere_leave_the_rest():
    # On wire 0 a gets 1/4 beside three of b; of the three that a has on wire 1, two thirds of its share are left to c.
    found = play(
        (0, flow("a", 100, {0: 1.0, 1: (1.0, 3)})), (0, flow("b", 300, {0: (1.0, 3)})), (0, flow("c", 75, {1: 1.0}))
    )
    assert found == {"c": 100, "a": 400, "b": 400}


def test_marks_on_the_way():
    # a: 25 alone; then half speed: mark 50 at 75. b: 100 at 225, when a is at 100 too.
    assert play((0, flow("a", [50, 100], {0: 1.0})), (25, flow("b", 50, {0: 1.0}))) == {"a": [75, 150], "b": 125}


def test_the_urgent_one_comes_first():
    # a waits from 20 on until b is done at 70; then it has 80 left.
    found = play((0, flow("a", 100, {0: 1.0})), (20, flow("b", 50, {0: 1.0}, priority=-1)))
    assert found == {"b": 70, "a": 150}


def test_the_less_urgent_one_gets_what_is_left():
    # b leaves a quarter of the wire, where a is at half speed: 50 at 100.
    found = play((0, flow("a", 100, {0: 0.5})), (0, flow("b", 100, {0: 0.75}, priority=-1)))
    assert found == {"b": 100, "a": 150}


def test_of_one_lane_the_older_one_comes_first():
    # Lane x and c take half each: b waits for a, which is done at 200 as c is.
    one, two = (flow(name, 100, {0: 1.0}, lane="x") for name in "ab")
    assert play((0, one), (0, two), (0, flow("c", 100, {0: 1.0}))) == {"a": 200, "c": 200, "b": 300}


def test_a_younger_one_of_a_lane_uses_what_is_left():
    one, two = flow("a", 100, {0: 1.0}, lane="x"), flow("b", 100, {1: 1.0}, lane="x")
    assert play((0, one), (0, two)) == {"a": 100, "b": 100}


def test_an_urgent_one_of_a_lane_overtakes():
    one, two = flow("a", 100, {0: 1.0}, lane="x"), flow("b", 100, {0: 1.0}, lane="x", priority=-1)
    assert play((0, one), (50, two)) == {"b": 150, "a": 200}


def test_caps():
    a, b = flow("a", 100, {}), flow("b", 100, {0: 1.0})
    assert play((0, a), (0, b), caps=[(0, a, 0.5), (50, a, 1.0), (50, b, 0.25)]) == {"a": 125, "b": 250}


def test_a_cap_leaves_the_rest_to_others():
    a, b = flow("a", 100, {0: 1.0}), flow("b", 100, {0: 1.0})
    assert play((0, a), (0, b), caps=[(0, a, 0.25)]) == {"b": 133, "a": 400}


def test_no_work_ends_at_once():
    assert play((5, flow("a", 0, {0: 1.0})), (5, flow("b", 10, {0: 1.0}))) == {"a": 5, "b": 15}


def test_order_of_starts_does_not_matter():
    flows = [flow(f"{n}", 100 + n, {0: 0.7, n % 3: 0.9}) for n in range(9)]
    again = [flow(f"{n}", 100 + n, {0: 0.7, n % 3: 0.9}) for n in range(9)]
    forwards, backwards = play(*((0, each) for each in flows)), play(*((0, each) for each in reversed(again)))
    assert forwards == backwards
    assert list(forwards) == list(backwards), "within an instant, keys order what is reached"


def test_flows_that_start_together_stand_in_the_order_of_keys():
    fluid = Fluid()
    fluid.start_flows(0, [flow(name, 10, {0: 1.0}) for name in "bca"])
    assert [each.key[0] for each in fluid.flows] == ["a", "b", "c"]
    assert repr(fluid) == "<Fluid: 3 flows>"


def test_a_key_is_used_once_at_a_time():
    fluid = Fluid()
    fluid.start_flows(0, [flow("a", 10, {})])
    with pytest.raises(AssertionError, match="in flight"):
        fluid.start_flows(0, [flow("a", 10, {})])


@st.composite
def crowds(draw):
    need = st.tuples(st.integers(1, 8).map(lambda n: n / 8), st.integers(1, 5))
    needs = st.dictionaries(st.integers(0, 4), need, min_size=1)
    return [flow(n, 100, draw(needs)) for n in range(draw(st.integers(1, 6)))]


@given(crowds())
def test_rates_are_max_min_fair(flows):
    """Nothing is overfull, and whoever is below its need meets a full resource on which nobody has risen further.

    A flow has risen by what it has of its messages' part of the resource that holds it back most.
    """
    found = fair_rates(flows, range(5))
    each_of = [sum(each.section.messages.get(r, 0) for each in flows) for r in range(5)]
    parts = [
        min(each.section.messages[r] / (each_of[r] * share) for r, share in each.section.needs.items())
        for each in flows
    ]
    used, level = np.zeros(5), [rate / part for rate, part in zip(found, parts, strict=True)]
    for each, rate in zip(flows, found, strict=True):
        used[each.section.resources] += each.section.shares * rate
    assert used.max() <= 1 + 1e-9
    for number, each in enumerate(flows):
        assert 0 < found[number] <= 1
        if found[number] < 1:
            full = [r for r in each.section.resources if used[r] > 1 - 1e-9]
            assert any(
                level[number] >= max(level[n] for n, other in enumerate(flows) if r in other.section.resources) - 1e-9
                for r in full
            )


@st.composite
def queues(draw):
    """Like crowds, with turns and caps."""
    flows = draw(crowds())
    for each in flows:
        each.priority, each.lane = draw(st.integers(0, 1)), draw(st.sampled_from([None, "x", "y"]))
        each.cap = draw(st.sampled_from([1.0, 0.5, 1 / 3]))
    return flows


@given(queues())
def test_the_most_urgent_take_what_they_would_alone(flows):
    """Neither less urgent flows nor younger ones of their lanes take anything from them; none passes its cap."""
    first = min(each.priority for each in flows)
    lanes = [each.lane for each in flows if each.priority == first]
    urgent = [each for each in flows if each.priority == first]
    urgent = [each for n, each in enumerate(urgent) if each.lane is None or each.lane not in lanes[:n]]
    rates = dict(zip(flows, fair_rates(flows, range(5)), strict=True))
    assert [rates[each] for each in urgent] == fair_rates(urgent, range(5))
    assert all(rate <= each.cap for each, rate in rates.items())


def test_a_crowd_that_comes_again_is_not_worked_out_again(monkeypatch):
    """Only if its flows are in the same sections, with the same limits and turns."""
    found = []

    def counting(flows, scarce):
        found.append(len(flows))
        return fair_rates(flows, scarce)

    monkeypatch.setattr(sharing, "fair_rates", counting)
    crowd = [flow(name, 100, {0: 1.0}) for name in "abc"]
    again = [Flow((each.key, "again"), [100], [each.section]) for each in crowd]
    rates = Rates()
    assert rates.find_rates(crowd, [0]) == rates.find_rates(again, [0]) == fair_rates(crowd, [0])
    assert found == [3]
    again[0].cap = 0.1
    assert rates.find_rates(again, [0]) == fair_rates(again, [0]) != rates.find_rates(crowd, [0])
    again[0].cap, again[1].priority = 1.0, 1
    assert rates.find_rates(again, [0]) == fair_rates(again, [0]) != rates.find_rates(crowd, [0])
    assert found == [3] * 3


def test_who_shares_nothing_scarce_is_left_alone(monkeypatch):
    """What happens on some wires costs those nothing who are on others."""
    shared = []

    def counting(self, flows, scarce):
        shared.append((sorted(each.key[0] for each in flows), sorted(scarce)))
        return fair_rates(flows, scarce)

    monkeypatch.setattr(Rates, "find_rates", counting)
    found = play(
        *((0, flow(name, 100, {0: 1.0})) for name in "ab"),
        *((10, flow(name, 100, {1: 1.0, 2: 0.1})) for name in "cd"),
        (20, flow("e", 10, {2: 0.8})),
    )
    assert found == {"a": 200, "b": 200, "c": 210, "d": 210, "e": 30}
    assert shared == [(["a", "b"], [0]), (["c", "d"], [1])]


@given(st.lists(crowds(), min_size=1, max_size=3))
def test_each_crowd_gets_what_it_would_get_among_all(groups):
    """Crowds on wires of their own, which start one after the other: rates are those that all at once would get."""
    every, each_alone = [], Fluid()
    for number, group in enumerate(groups):
        for each in group:
            needs = {r + 5 * number: (share, each.section.messages[r]) for r, share in each.section.needs.items()}
            every.append(flow((number, *each.key), 100, needs))
        each_alone.start_flows(0, [each for each in every if each.key[0][0] == number])
        each_alone.update_rates(0)
    load = {r: sum(each.section.needs.get(r, 0) for each in every) for r in range(15)}
    scarce = [resource for resource in load if load[resource] > 1]
    crowded = [each for each in every if any(each.section.needs.get(resource) for resource in scarce)]
    expected = dict.fromkeys(every, 1.0)
    if crowded:
        expected.update(zip(crowded, fair_rates(crowded, scarce), strict=True))
    assert [each.rate for each in every] == pytest.approx([expected[each] for each in every], rel=1e-12)
