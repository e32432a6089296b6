"""What a root copies to its own result, beside its messages: the model against the steps of its program."""

import pytest

from overlap.collectives import generate
from overlap.collectives.program import StepKind, project_all
from overlap.collectives.schedule import Buffer
from overlap.cost import cost, on, rounds
from overlap.cost.phase import PricedPhase

from .star import Star

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
    return on(star, rounds(generate(collective, algorithm, SIZE, root=2)))


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
    assert rounds(schedule).rounds[0].local.tolist() == [0, 0, 2, 0, 0]
    assert rounds(schedule).rounds[0].beside is None


def test_what_a_later_step_sends_of_a_copied_input_is_taken_to_be_there():
    schedule = generate("broadcast", "binomial", SIZE, root=2)
    later = (schedule.src == 2) & (schedule.dst != 2) & (schedule.step > 0)
    assert later.any()
    schedule.sbuf[later] = Buffer.OUT
    first = rounds(schedule).rounds[0]
    assert (first.local.tolist(), first.beside.tolist()) == ([0, 0, 0, 0, 0], [0, 0, 2, 0, 0])
