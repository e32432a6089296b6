"""Pipeline schedules are data: made as published, proved, timed by their formulas, drawn, read and written."""

from itertools import product

import pytest

import overlap
from overlap.parallel import schedules
from overlap.parallel.schedules import FAMILIES, Action, ActionKind, Durations, PipelineSchedule
from tests.errors import error_of

# The orders as published: of 4 ranks and 8 microbatches, or of 2 ranks with 2 stages each and 4 microbatches.
PUBLISHED = {
    "1f1b": (4, 8, """
        0F0,0F1,0F2,0F3,0B0,0F4,0B1,0F5,0B2,0F6,0B3,0F7,0B4,0B5,0B6,0B7
        1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1F5,1B3,1F6,1B4,1F7,1B5,1B6,1B7
        2F0,2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2F5,2B4,2F6,2B5,2F7,2B6,2B7
        3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5,3F6,3B6,3F7,3B7"""),
    "zb-h1": (4, 8, """
        0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1,0F5,0I2,0W2,0F6,0I3,0W3,0F7,0I4,0W4,0I5,0W5,0I6,0W6,0I7,0W7
        1F0,1F1,1F2,1I0,1F3,1I1,1W0,1F4,1I2,1W1,1F5,1I3,1W2,1F6,1I4,1W3,1F7,1I5,1W4,1I6,1W5,1I7,1W6,1W7
        2F0,2F1,2I0,2F2,2I1,2F3,2I2,2W0,2F4,2I3,2W1,2F5,2I4,2W2,2F6,2I5,2W3,2F7,2I6,2W4,2I7,2W5,2W6,2W7
        3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3F4,3I4,3W1,3F5,3I5,3W2,3F6,3I6,3W3,3F7,3I7,3W4,3W5,3W6,3W7"""),
    "interleaved-1f1b": (2, 4, """
        0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
        1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3"""),
    "zb-h2": (4, 8, """
        0F0,0F1,0F2,0F3,0F4,0F5,0F6,0I0,0W0,0F7,0I1,0W1,0I2,0W2,0I3,0W3,0I4,0W4,0I5,0W5,0I6,0W6,0I7,0W7
        1F0,1F1,1F2,1F3,1F4,1I0,1F5,1I1,1F6,1I2,1W0,1F7,1I3,1W1,1I4,1W2,1I5,1W3,1I6,1W4,1I7,1W5,1W6,1W7
        2F0,2F1,2F2,2I0,2F3,2I1,2F4,2I2,2F5,2I3,2F6,2I4,2W0,2F7,2I5,2W1,2I6,2W2,2I7,2W3,2W4,2W5,2W6,2W7
        3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3F4,3I4,3F5,3I5,3F6,3I6,3W0,3F7,3I7,3W1,3W2,3W3,3W4,3W5,3W6,3W7"""),
    "zb-v": (2, 4, """
        0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,0I3,0W3
        1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,2W3,1W3"""),
    "dualpipe-v": (2, 4, """
        0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3B1,3F2,0B0,3B2,3F3,0B1,3B3,0I2,0W2,0I3,0W3
        1F0,2F0,1F1,2F1,1F2,2B0,2F2,1B0,1F3,2B1,2F3,1B1,2B2,1B2,2I3,1I3,2W3,1W3"""),
    "gpipe": (2, 3, """
        0F0,0F1,0F2,0B0,0B1,0B2
        1F0,1F1,1F2,1B0,1B1,1B2"""),
}  # fmt: skip

MIXES = [
    Durations(),
    Durations(forward=2, input_gradient=3),
    Durations(forward=3, weight_gradient=5),
    Durations(forward=0),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_is_the_published_one(name: str) -> None:
    ranks, microbatches, text = PUBLISHED[name]
    made = schedules.make(name.upper(), ranks=ranks, microbatches=microbatches)
    assert made == PipelineSchedule.parse(text.replace(" ", ""))
    assert made.text() == "\n".join(text.split()) + "\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bubble_on_paper_is_that_of_the_formula(name: str) -> None:
    tried = 0
    for ranks, microbatches, durations in product(range(1, 6), range(1, 10), MIXES):
        if name == "interleaved-1f1b" and microbatches % max(1, microbatches // ranks):
            continue
        if name == "dualpipe-v" and microbatches < 2 * ranks:
            continue
        formula = FAMILIES[name].bubble(ranks, microbatches, durations)
        if formula is not None:
            schedule = schedules.make(name, ranks=ranks, microbatches=microbatches)
            assert schedule.timing(durations).bubble == (formula,) * ranks
            tried += 1
    assert tried >= 20


def test_formulas_hold_from_as_many_microbatches_as_fill_the_pipeline() -> None:
    found = {
        name: [next(m for m in range(1, 9) if family.bubble(ranks, m, Durations()) is not None) for ranks in (1, 2, 4)]
        for name, family in FAMILIES.items()
    }
    assert found == {
        "gpipe": [1, 1, 1],
        "1f1b": [1, 1, 1],
        "interleaved-1f1b": [1, 2, 4],
        "zb-h1": [1, 2, 4],
        "zb-h2": [1, 3, 7],
        "zb-v": [1, 3, 7],
        "dualpipe-v": [1, 1, 1],
    }


def test_more_chunks_divide_the_bubble() -> None:
    """Of equal models: a rank's whole part takes 12 forwards and 24 backwards, however it is cut."""
    bubbles = [
        schedules.interleaved_1f1b(4, 8, v)
        .timing(Durations(forward=12 // v, input_gradient=12 // v, weight_gradient=12 // v))
        .bubble[0]
        for v in (1, 2, 3, 4)
    ]
    assert bubbles == [108, 54, 36, 27]


def test_what_ranks_hold_at_once_is_as_published() -> None:
    live = {name: schedules.make(name, ranks=4, microbatches=8).peak_live for name in FAMILIES}
    assert live == {
        "gpipe": (8, 8, 8, 8),
        "1f1b": (4, 3, 2, 1),
        "interleaved-1f1b": (11, 9, 7, 5),
        "zb-h1": (4, 4, 4, 4),
        "zb-h2": (7, 7, 7, 7),
        "zb-v": (8, 8, 8, 8),
        "dualpipe-v": (9, 9, 9, 9),
    }


def test_a_hop_delays_what_comes_from_another_rank() -> None:
    assert schedules.gpipe(3, 1).timing(Durations(hop=10)).makespan == 3 * 3 + 4 * 10
    assert schedules.interleaved_1f1b(1, 1, 3).timing(Durations(hop=10)).makespan == 3 * 3


def test_it_is_drawn_ranks_by_time() -> None:
    assert str(schedules.one_f_one_b(2, 3)) == (
        "time  0  1  2  3  4  5  6  7  8  9  10 11\n"
        "   0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\n"
        "   1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  ."
    )  # fmt: skip


def test_the_drawing_is_cut_to_a_width() -> None:
    lines = schedules.interleaved_1f1b(2, 2, 2).grid(Durations(input_gradient=0, weight_gradient=1), width=26)
    assert lines == [
        "time  0   1   2   3   4",
        "   0  0F0 0F1 2F0 2F1 .",
        "   1  .   1F0 1F1 3F0 3B0",
        "",
        "time  5   6   7   8   9",
        "   0  2B0 .   2B1 0B0 0B1",
        "   1  3F1 3B1 1B0 1B1 .",
    ]


def test_own_schedules_are_read_with_idle_cells() -> None:
    own = PipelineSchedule.parse("0F0,,0F1,0B1,0B0\n,1F0,1F1,1B1,1B0\n\n", name="mine")
    assert (own.name, own.ranks, own.stages, own.microbatches, own.owners) == ("mine", 2, 2, 2, (0, 1))
    assert not own.splits_backward
    assert schedules.zb_h1(2, 2).splits_backward
    assert repr(own) == "<PipelineSchedule mine: 2 ranks, 2 stages, 2 microbatches>"
    assert hash(own) == hash(PipelineSchedule("other", own.rows))


@pytest.mark.parametrize("rank", [2, 3, -1])
def test_a_rank_that_a_schedule_does_not_have_is_refused(rank: int) -> None:
    schedule = schedules.interleaved_1f1b(2, 2, 2)
    assert [schedule.stages_of(own) for own in range(2)] == [(0, 2), (1, 3)]
    error = error_of(overlap.UsageError, schedule.stages_of, rank)
    assert str(error) == (f"stages_of: schedule {schedule.name!r} is for 2 ranks, from 0 to 1, got {rank}")


TAKES = "; it takes F and B, or F, I and W"


@pytest.mark.parametrize(
    ("text", "told", "place"),
    [
        ("0F0,0B0,0F0", "0F0 is there twice; leave out one\n  rank 0: 0F0 0B0 >>0F0<<", (0, 2)),
        ("0F0,0B0\n0F1,0B1", "rank 0 has stage 0; leave it to one\n  rank 0: 0F0 0B0\n  rank 1: >>0F1<< 0B1", (1, 0)),
        (
            "0F0,0B0\n2F0,2B0",
            "no rank has stage 1; give its actions to one\n  rank 0: 0F0 0B0\n  rank 1: 2F0 2B0",
            (None, None),
        ),
        ("", "no rank has an action; give each rank some", (None, None)),
        ("0F0,0F1,0B0", "stage 0 has F of microbatch 1" + TAKES + "\n  rank 0: 0F0 0F1 0B0", (0, None)),
        ("0F0,0I0", "stage 0 has F, I of microbatch 0" + TAKES + "\n  rank 0: 0F0 0I0", (0, None)),
        ("0F1,0B1", "stage 0 has nothing of microbatch 0" + TAKES + "\n  rank 0: 0F1 0B1", (0, None)),
        ("0B0,0F0", "it never ends: rank 0 waits in 0B0 for 0F0; reorder them\n  rank 0: >>0B0<< 0F0", (0, 0)),
        ("0F0,0W0,0I0", "it never ends: rank 0 waits in 0W0 for 0I0; reorder them\n  rank 0: 0F0 >>0W0<< 0I0", (0, 1)),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "it never ends: rank 0 waits in 0B0 for 1B0 or 1I0, rank 1 waits in 1F1 for 0F1; reorder them\n"
            "  rank 0: 0F0 >>0B0<< 0F1 0B1\n  rank 1: 1F0 1F1 1B0 1B1",
            (0, 1),
        ),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_shown_whole_with_the_place_marked(
    text: str, told: str, place: tuple[int | None, int | None]
) -> None:
    error = error_of(overlap.ScheduleError, PipelineSchedule.parse, text)
    assert str(error) == f"schedule 'own': {told}"
    assert (error.rank, error.step) == place


def test_damage_anywhere_is_found() -> None:
    """Each action taken out, doubled, or moved behind what needs it."""
    for name in FAMILIES:
        fewest = 4 if name == "dualpipe-v" else 2
        rows = [list(row) for row in schedules.make(name, ranks=2, microbatches=fewest).rows]
        for rank, row in enumerate(rows):
            for step, action in enumerate(row):
                last = max(at for at, each in enumerate(row) if each[::2] == action[::2])
                for damaged in (
                    row[:step] + row[step + 1 :],
                    [*row[: step + 1], *row[step:]],
                    *([row[:step] + row[step + 1 : last + 1] + [action] + row[last + 1 :]] if last > step else []),
                ):
                    with pytest.raises(overlap.ScheduleError):
                        PipelineSchedule(name, [*rows[:rank], damaged, *rows[rank + 1 :]])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            {"name": "2f2b"},
            "name: '2f2b' is no schedule; known are gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v",
        ),
        ({"ranks": 0}, "ranks: expected a whole number from 1, got 0"),
        ({"microbatches": 2.5}, "microbatches: expected a whole number from 1, got 2.5"),
        (
            {"chunks": 3},
            "chunks: 1f1b has one stage on each rank, got 3; "
            "leave out chunks, or name interleaved-1f1b, which takes any number",
        ),
        (
            {"name": "zb-v", "chunks": 1},
            "chunks: zb-v has 2 stages on each rank, got 1; "
            "leave out chunks, or name interleaved-1f1b, which takes any number",
        ),
        (
            {"name": "dualpipe-v", "microbatches": 4},
            "microbatches: dualpipe-v takes at least 8, two for each rank; got 4",
        ),
        (
            {"name": "interleaved-1f1b", "microbatches": 9},
            "microbatches: 9 do not divide into 2 rounds (microbatches // ranks); 8 or 10 do",
        ),
    ],
)
def test_what_cannot_be_meant_is_told(wrong: dict[str, object], told: str) -> None:
    error = error_of(overlap.UsageError, schedules.make, **{"name": "1f1b", "ranks": 4, "microbatches": 8, **wrong})
    assert str(error) == told


def test_a_text_that_is_no_action_is_told() -> None:
    assert str(error_of(overlap.UsageError, PipelineSchedule.parse, "0F0,0X0")) == (
        "text: '0X0' is no action; one is a stage, F, B, I or W, and a microbatch, such as 2F0"
    )
    assert Action.parse("12W3") == (12, ActionKind.WEIGHT_GRADIENT, 3)
