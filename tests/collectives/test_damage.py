"""Damaged tables are caught: each kind of damage, in any row of any schedule."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlap.collectives import GENERATORS, Schedule, fits, generate, project_all, verify
from overlap.collectives.explain import count_contributors
from overlap.collectives.explain import count_expected_contributors as wanted
from overlap.collectives.schedule import COLUMNS
from overlap.errors import ScheduleError

from .executor import execute
from .reference import expected, random_inputs

NAMES = [(kind, name) for kind, names in GENERATORS.items() for name in names if kind != "permute"]
Columns = dict[str, np.ndarray]
Damage = Callable[[Schedule, Columns, int, int], None]


def drop(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    for name, column in columns.items():
        columns[name] = np.delete(column, row)


def duplicate(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    for name, column in columns.items():
        columns[name] = np.insert(column, row, column[row])


def swap_op(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    columns["op"][row] ^= 1


def add_to(name: str, modulus: Callable[[Schedule, Columns, int], int]) -> Damage:
    def damage(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
        several = modulus(schedule, columns, row)
        assume(several > 1)
        columns[name][row] = (columns[name][row] + 1 + amount % (several - 1)) % several

    damage.__name__ = f"change_{name}"
    return damage


def wrong_block(name: str, buffer: str) -> Damage:
    """Shift by whole blocks, so that both ends still agree on lengths."""

    def damage(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
        k, slots = schedule.slots_per_block, schedule.slots[columns[buffer][row]]
        blocks = slots // k
        assume(blocks > 1)
        columns[name][row] = (columns[name][row] + k * (1 + amount % (blocks - 1))) % slots

    damage.__name__ = f"wrong_block_{name}"
    return damage


def wrong_slots(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    """Move both ends to another place within the block."""
    k = schedule.slots_per_block
    assume(k > 1)
    for name in ("sslot", "dslot"):
        block, index = divmod(int(columns[name][row]), k)
        columns[name][row] = block * k + (index + 1 + amount % (k - 1)) % k


def longer(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    columns["count"][row] += 1


def shorter(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    row = int(np.argmax(np.roll(columns["count"], -row) > 1) + row) % len(schedule)
    assume(columns["count"][row] > 1)
    columns["count"][row] -= 1


def shift_step(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    columns["step"][row] += 1 if amount % 2 else -1
    assume(columns["step"][row] >= 0)


def ungroup(schedule: Schedule, columns: Columns, row: int, amount: int) -> None:
    row = int(np.argmax(np.roll(columns["group"], -row) >= 0) + row) % len(schedule)
    assume(columns["group"][row] >= 0)
    columns["group"][row] = -1


def ranks(schedule: Schedule, columns: Columns, row: int) -> int:
    return schedule.size


def buffers(schedule: Schedule, columns: Columns, row: int) -> int:
    return 3


def own_slots(schedule: Schedule, columns: Columns, row: int) -> int:
    return schedule.slots_per_block


MANY = settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])

# What no row of our schedules survives, since none does anything twice or in vain.
FATAL: list[Damage] = [
    drop,
    duplicate,
    swap_op,
    shorter,
    wrong_slots,
    wrong_block("dslot", "dbuf"),
    add_to("dslot", own_slots),
]
# What may leave a table that is as good as before: the oracle decides.
DOUBTFUL: list[Damage] = [
    wrong_block("sslot", "sbuf"),  # as good where the block that is read is a copy of the right one
    add_to("sslot", own_slots),
    add_to("src", ranks),
    add_to("dst", ranks),
    add_to("sbuf", buffers),
    add_to("dbuf", buffers),
    longer,
    shift_step,
    ungroup,
]


def damaged(schedule: Schedule, damage: Damage, row: int, amount: int) -> Schedule:
    """Return the schedule with one row damaged, and its rows in order again."""
    columns = {name: getattr(schedule, name).copy() for name in COLUMNS}
    damage(schedule, columns, row, amount)
    order = np.lexsort((columns["src"] != columns["dst"], columns["step"]))
    return replace(schedule, **{name: column[order] for name, column in columns.items()})


def sound(schedule: Schedule) -> bool:
    """Return whether a table is right all the same: by exact origins, and by running it in random orders."""
    slots = range(schedule.slots[1])
    ends = [schedule.root] if schedule.collective in ("reduce", "gather") else range(schedule.size)
    if any(count_contributors(schedule, rank, slot) != wanted(schedule, rank, slot) for rank in ends for slot in slots):
        return False
    inputs = random_inputs(schedule, 3)
    answers = expected(schedule, inputs)
    runs = [execute(schedule, project_all(schedule), inputs, seed=seed, shared=seed % 2 == 0) for seed in range(4)]
    return all(np.array_equal(run[rank], answers[rank]) for run in runs for rank in ends)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    collective, algorithm = draw(st.sampled_from(NAMES))
    size = draw(st.integers(2, 9))
    assume(fits(algorithm, size))
    options = {"nodes": 2, "slices": draw(st.integers(1, 2))} if algorithm == "hierarchical" and size % 2 == 0 else {}
    schedule = generate(collective, algorithm, size, root=0, **options)
    return schedule, draw(st.integers(0, len(schedule) - 1)), draw(st.integers(0, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("damage", FATAL, ids=lambda damage: damage.__name__)
@MANY
@given(case=cases())
def test_fatal_damage_is_refused(damage: Damage, case: tuple[Schedule, int, int]) -> None:
    broken = damaged(case[0], damage, case[1], case[2])
    with pytest.raises(ScheduleError):
        verify(broken)


@pytest.mark.parametrize("damage", DOUBTFUL, ids=lambda damage: damage.__name__)
@MANY
@given(case=cases())
def test_what_passes_is_sound(damage: Damage, case: tuple[Schedule, int, int]) -> None:
    changed = damaged(case[0], damage, case[1], case[2])
    try:
        verify(changed)
    except ScheduleError:
        return
    assert sound(changed)


def test_a_block_may_be_read_from_where_it_was_copied_from() -> None:
    """What leaves a node from its leader is gathered in one place of the leader's scratch, its own part too."""
    schedule = generate("gather", "hierarchical", 4, root=0, nodes=2, slices=1)
    reads = zip(schedule.src.tolist(), schedule.dst.tolist(), schedule.sslot.tolist(), strict=True)
    sslot = [0 if read == (1, 0, 4) else read[2] for read in reads]
    changed = replace(schedule, sslot=np.array(sslot, schedule.sslot.dtype))
    assert (changed.sslot != schedule.sslot).sum() == 1
    verify(changed)
    assert sound(changed)


@pytest.mark.slow  # some rows of some schedules are dropped above
@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_no_row_of_any_schedule_can_be_spared(collective: str, algorithm: str) -> None:
    schedule = generate(collective, algorithm, 4)
    for row in range(len(schedule)):
        with pytest.raises(ScheduleError):
            verify(damaged(schedule, drop, row, 0))
