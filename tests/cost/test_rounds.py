"""What a table asks of the machine: messages, repeats, touches of memory, copies of roots."""

import dataclasses

import numpy as np
import pytest

from overlap.collectives import generate
from overlap.collectives.program import StepKind, project_all
from overlap.collectives.schedule import Buffer, Schedule
from overlap.cost.clocks import cost
from overlap.cost.phase import PricedPhase
from overlap.cost.placed import place_rounds
from overlap.cost.regular import ring_rounds
from overlap.cost.rounds import read_rounds

from .star import Star

# -- what a table asks of the machine: messages, repeats, touches of memory --------------------------------------------


def assert_same(one, other):
    assert (one.size, one.slots) == (other.size, other.slots)
    for a, b in zip(one.rounds, other.rounds, strict=True):
        for field in dataclasses.fields(a):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), field.name)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_rings_without_their_table(collective, size):
    orders = [np.random.default_rng(seed).permutation(size).tolist() for seed in range(3)]
    assert_same(
        merged(ring_rounds(collective, orders)),
        merged(read_rounds(generate(collective, "multi_ring", size, orders=orders))),
    )
    assert_same(
        merged(ring_rounds(collective, orders[:1])),
        merged(read_rounds(generate(collective, "ring", size, order=orders[0]))),
    )


def merged(found):
    """Join neighbours that differ by their repeat only, and drop rounds in which nothing happens."""
    kept = []
    for each in found.rounds:
        if not len(each.src) and not each.local.any():
            continue
        if kept and all(
            np.array_equal(getattr(kept[-1], f.name), getattr(each, f.name))
            for f in dataclasses.fields(each)
            if f.name != "repeat"
        ):
            kept[-1] = dataclasses.replace(each, repeat=kept[-1].repeat + each.repeat)
        else:
            kept.append(each)
    return dataclasses.replace(found, rounds=tuple(kept))


def test_a_ring_is_a_handful_of_rounds():
    found = read_rounds(generate("all_reduce", "ring", 16))
    assert [each.repeat for each in found.rounds] == [1, 14, 1, 14]
    assert found.steps == 30
    assert found.sent_share == 30 / 16


def test_steps_that_differ_in_one_column_are_rounds_of_their_own():
    table = generate("all_reduce", "ring", 6)
    for name in ("src", "dst", "count", "op"):
        column = getattr(table, name).copy()
        row = int(np.flatnonzero(table.step == 3)[0])
        column[row] = 1 - column[row] if name == "op" else (column[row] + 2) % 6
        changed = dataclasses.replace(table, **{name: column})
        assert len(read_rounds(changed).rounds) == len(read_rounds(table).rounds) + 2, name


def test_groups_that_differ_make_rounds_differ():
    table = generate("all_gather", "kangaring", 8)
    assert len(read_rounds(table).rounds) < table.steps
    ungrouped = np.where(table.step == 1, -1, table.group).astype(np.int32)
    assert len(read_rounds(dataclasses.replace(table, group=ungrouped)).rounds) == len(read_rounds(table).rounds) + 1


@pytest.mark.parametrize(
    ("collective", "algorithm", "per_pair"),
    # aws-neuron-sdk, intranode-collective-comm: KangaRing touches memory 3 times instead of 4, and 4 instead of 6.
    [
        ("all_gather", "ring", 4),
        ("all_gather", "kangaring", 3),
        ("reduce_scatter", "ring", 6),
        ("reduce_scatter", "kangaring", 4),
    ],
)
def test_touches_of_memory_for_two_ranks_and_a_chunk(collective, algorithm, per_pair):
    middle = read_rounds(generate(collective, algorithm, 16)).rounds[1]
    touched = (middle.moving + middle.adding).sum()
    received = {"ring": 16, "kangaring": 32}[algorithm]  # chunks that come in, in one step
    assert touched == per_pair * received / 2


def test_a_fan_out_reads_once_and_a_fan_in_writes_once():
    (out,) = read_rounds(generate("all_gather", "mesh", 5)).rounds
    assert out.moving.tolist() == [1 + 4] * 5
    assert out.local.tolist() == [2] * 5  # its own block, from IN to OUT
    gather = read_rounds(generate("reduce_scatter", "mesh", 5)).rounds[0]
    assert gather.adding.tolist() == [4 + 2] * 5
    assert gather.added.tolist() == [4] * 5
    assert gather.local.tolist() == [0] * 5  # fused with the reduction


def test_rows_between_two_ranks_are_one_message():
    table = generate("all_gather", "bruck", 6)
    found = read_rounds(table)
    assert [len(each.src) for each in found.rounds] == [6, 6, 6]
    assert [each.sent.tolist() for each in found.rounds] == [[1.0] * 6, [2.0] * 6, [2.0] * 6]


def test_local_additions_are_reduced_before_anything_travels():
    found = read_rounds(generate("all_reduce", "one_shot", 4))
    assert sum(each.repeat * each.local_added[0] for each in found.rounds) == 3
    assert found.steps == 1
    assert found.sent_share == 3


def test_what_slots_are_counted_on():
    per_rank = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    for collective in (*per_rank, "all_reduce", "broadcast", "reduce"):
        table: Schedule = generate(collective, "mesh", 3)
        expected = table.slots_per_block * (3 if collective in per_rank else 1)
        assert read_rounds(table).slots == expected, collective


def test_copies_of_a_group():
    inside = read_rounds(generate("all_gather", "ring", 2)).copy_to_groups([(0, 3), (2, 1)], 4)
    (each,) = inside.rounds
    assert sorted(zip(each.src.tolist(), each.dst.tolist(), strict=True)) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert each.dst.tolist() == sorted(each.dst.tolist())
    assert each.moving.tolist() == [2.0] * 4
    assert inside.slots == 2


def test_steps_without_rows_are_rounds_without_messages():
    whole = generate("all_gather", "bucket", 4)
    gap = dataclasses.replace(
        whole, step=whole.step + 2 * (whole.step > 0), group=np.arange(len(whole), dtype=np.int32)
    )
    assert_same(merged(read_rounds(gap)), merged(read_rounds(dataclasses.replace(gap, step=whole.step))))


# -- what a root copies to its own result, beside its messages: the model against the steps of its program -------------

SIZE = 5
GIVING = [
    ("broadcast", "mesh"),
    ("broadcast", "chain"),
    ("broadcast", "binomial"),
    ("scatter", "mesh"),
    ("scatter", "binomial"),
]


def placed(collective, algorithm, *, memory_bytes_per_s):
    star = Star(SIZE, latency_s=0.0, bytes_per_s=1.0)
    star.memory_bytes_per_s = memory_bytes_per_s
    return place_rounds(star, read_rounds(generate(collective, algorithm, SIZE, root=2)))


def programs_s(schedule, slot_bytes, copied_s_per_byte):
    """Return when the last step of all programs is done, where a message takes a second for each byte."""
    programs = project_all(schedule)
    ends = {(rank, lane): [] for rank in range(SIZE) for lane in range(len(programs[rank].queues))}
    sent = {}  # by who sends to whom, in order: when each message is there

    def next_end_s(rank, lane, step):
        """Return when a queue's next step ends; None if something that it waits for is still to come."""
        if any(len(ends[rank, other]) < count for other, count in step.waits):
            return None
        begins = [ends[rank, other][count - 1] for other, count in step.waits]
        begin_s = max([*ends[rank, lane][-1:], *begins], default=0.0)
        if step.kind is StepKind.RECV:
            arrived = sent.get((step.peer, rank))
            return max(begin_s, arrived.pop(0)) if arrived else None
        takes_s = step.src.count * slot_bytes
        if step.kind is StepKind.LOCAL:
            return begin_s + takes_s * copied_s_per_byte
        sent.setdefault((rank, step.peer), []).append(begin_s + takes_s)
        return begin_s + takes_s

    moved = True
    while moved:
        moved = False
        for (rank, lane), done in ends.items():
            for step in programs[rank].queues[lane][len(done) :]:
                end_s = next_end_s(rank, lane, step)
                if end_s is None:
                    break
                done.append(end_s)
                moved = True
    assert all(len(done) == len(programs[rank].queues[lane]) for (rank, lane), done in ends.items())
    return max(end for done in ends.values() for end in done)


@pytest.mark.parametrize(("collective", "algorithm"), GIVING)
def test_giving_takes_what_the_programs_take(collective, algorithm):
    """Copies read and write at eight times what a wire carries, and take a quarter of a message's time."""
    schedule = generate(collective, algorithm, SIZE, root=2)
    model = placed(collective, algorithm, memory_bytes_per_s=8.0)
    taken_s = programs_s(schedule, 960 / model.rounds.slots, copied_s_per_byte=2 / 8)
    assert cost(model, 960).total_s == pytest.approx(taken_s, rel=1e-9)


def test_a_root_copies_beside_what_it_sends():
    four_messages = {"total_s": 4 * 960.0, "explained": 4 * 960.0}
    model = placed("broadcast", "mesh", memory_bytes_per_s=8.0)
    found = cost(model, 960, explain=True)
    assert {"total_s": found.total_s, "explained": found.breakdown.wire_s} == four_messages


def test_a_copy_counts_where_it_is_longer_than_the_messages_or_takes_their_memory():
    slow = placed("broadcast", "mesh", memory_bytes_per_s=1 / 8)
    found = cost(slow, 960, explain=True)
    assert found.total_s == 2 * 960 * 8  # a read and a write
    assert found.breakdown.memory_s == found.total_s
    assert PricedPhase(slow).total_s(960) == 3 * 960 * 8  # and what is sent is read


def test_what_a_step_sends_of_what_it_copies_waits_for_the_copy():
    schedule = generate("broadcast", "mesh", SIZE, root=2)
    remote = schedule.src != schedule.dst
    schedule.sbuf[remote] = Buffer.OUT
    assert read_rounds(schedule).rounds[0].local.tolist() == [0, 0, 2, 0, 0]
    assert read_rounds(schedule).rounds[0].unawaited is None


def test_what_a_later_step_sends_of_a_copied_input_is_taken_to_be_there():
    schedule = generate("broadcast", "binomial", SIZE, root=2)
    later = (schedule.src == 2) & (schedule.dst != 2) & (schedule.step > 0)
    assert later.any()
    schedule.sbuf[later] = Buffer.OUT
    first = read_rounds(schedule).rounds[0]
    assert (first.local.tolist(), first.unawaited.tolist()) == ([0, 0, 0, 0, 0], [0, 0, 2, 0, 0])
