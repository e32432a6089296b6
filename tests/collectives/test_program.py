"""Programs do what their schedule says, in any order that their queues and waits allow, without buffering."""

import gc
from typing import Any

import numpy as np
import pytest

from overlap.collectives import Buffer, Extent, Op, StepKind, generate, project, project_all, verify
from overlap.collectives.hazards import find_waits
from overlap.collectives.tablewriter import TableWriter
from overlap.threads import paused_garbage_collector

from .cases import fitting, schedules
from .executor import Stuck, execute
from .reference import expected, random_inputs


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize(("collective", "algorithm", "size"), fitting([1, 2, 3, 4, 6, 7, 8]))
def test_any_order_gives_the_same_result(collective: str, algorithm: str, size: int, shared: bool) -> None:
    for schedule in schedules(collective, algorithm, size):
        programs = project_all(schedule)
        inputs = random_inputs(schedule, 5)
        wanted = expected(schedule, inputs)
        for seed in range(4):
            got = execute(schedule, programs, inputs, seed=seed, shared=shared)
            receives = {pair[1] for pair in schedule.pairs}
            for rank, (g, w) in enumerate(zip(got, wanted, strict=True)):
                if w is not None and (schedule.collective != "permute" or rank in receives):
                    assert np.array_equal(g, w), (schedule, seed, rank)


@pytest.mark.parametrize(("collective", "algorithm", "size"), fitting([6]))
def test_one_rank_is_projected_as_all_are(collective: str, algorithm: str, size: int) -> None:
    for schedule in schedules(collective, algorithm, size):
        assert [project(schedule, rank) for rank in range(size)] == project_all(schedule)


def test_ring_reads_the_input_where_it_lies() -> None:
    program = project(generate("all_reduce", "ring", 4), 1)
    sends, receives = program.queues
    assert [s.kind for s in sends] == [StepKind.SEND] * 6
    assert [s.kind for s in receives] == [StepKind.RECV] * 3 + [StepKind.LOCAL] + [StepKind.RECV] * 3
    assert [s.base for s in receives[:3]] == [Extent(Buffer.IN, slot, 1) for slot in (3, 2, 1)]
    assert sends[0].src == Extent(Buffer.IN, 0, 1)
    assert [s.waits for s in sends] == [(), ((1, 1),), ((1, 2),), ((1, 4),), ((1, 5),), ((1, 6),)]


def test_a_root_sends_its_input_beside_the_copy_to_its_result() -> None:
    """Where both are the same memory, that copy changes nothing; what is read from the result waits for it."""
    sends, copies = project(generate("broadcast", "mesh", 4, root=2), 2).queues
    assert [s.kind for s in copies] == [StepKind.LOCAL]
    assert [(s.src.buffer, s.waits) for s in sends] == [(Buffer.IN, ())] * 3
    table = TableWriter()
    table.add_moves(0, 0, 0, (Buffer.IN, 0), (Buffer.OUT, 0))
    table.add_moves(1, 0, 1, (Buffer.OUT, 0), (Buffer.OUT, 0))
    (sends, _) = project(table.build("broadcast", "by hand", 2, root=0), 0).queues
    assert [s.waits for s in sends] == [((1, 1),)]


def test_mesh_meets_pairwise() -> None:
    for rank, program in enumerate(project_all(generate("all_reduce", "mesh", 5))):
        sends, receives = program.queues
        nearest = [(rank + d) % 5 for d in (1, 2, 3, 4)]
        farthest = [(rank - d) % 5 for d in (1, 2, 3, 4)]
        assert [s.peer for s in sends] == farthest + nearest
        assert [s.peer for s in receives if s.kind is StepKind.RECV] == nearest + farthest
        assert [s.op for s in receives] == [Op.ADD] * 4 + [Op.MOVE] * 5


def test_the_executor_notices_a_missing_wait() -> None:
    schedule = generate("all_reduce", "ring", 4)
    programs = project_all(schedule)
    careless = [
        type(p)(p.rank, tuple(tuple(step._replace(waits=()) for step in queue) for queue in p.queues)) for p in programs
    ]
    inputs = random_inputs(schedule, 8)
    wanted = expected(schedule, inputs)
    results = [execute(schedule, careless, inputs, seed=seed, shared=False) for seed in range(8)]
    assert any(not np.array_equal(r[0], wanted[0]) for r in results)


def test_the_executor_notices_a_deadlock() -> None:
    schedule = generate("all_gather", "ring", 3)
    programs = project_all(schedule)
    first, *rest = programs[0].queues[1]
    blocked = type(programs[0])(0, (programs[0].queues[0], (first._replace(waits=((0, 2),)), *rest)))
    with pytest.raises(Stuck):
        execute(schedule, [blocked, *programs[1:]], random_inputs(schedule, 2), seed=0, shared=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("inter", ["ring", "recursive_doubling", "one_shot", "binary_tree"])
@pytest.mark.parametrize("intra", ["mesh", "multi_ring", "kangaring", "swing"])
def test_pipelined_levels_run_in_any_order(intra: str, inter: str, shared: bool, seed: int) -> None:
    schedule = generate("all_reduce", "hierarchical", 12, nodes=3, intra=intra, inter=inter, slices=3)
    programs, inputs = project_all(schedule), random_inputs(schedule, 41)
    wanted = expected(schedule, inputs)
    got = execute(schedule, programs, inputs, seed=seed, shared=shared)
    assert all(np.array_equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_whole_vectors_are_added_from_where_they_lie() -> None:
    (sends, receives) = project(generate("all_reduce", "recursive_doubling", 4), 2).queues
    assert [s.src.buffer for s in sends] == [Buffer.IN, Buffer.SCRATCH]
    first, second, last = receives
    assert (first.base, first.dst) == (Extent(Buffer.IN, 0, 1), Extent(Buffer.SCRATCH, 1, 1))
    assert (second.base, second.dst) == (Extent(Buffer.SCRATCH, 1, 1), Extent(Buffer.SCRATCH, 0, 1))
    assert (last.kind, last.src, last.dst) == (StepKind.LOCAL, Extent(Buffer.SCRATCH, 0, 1), Extent(Buffer.OUT, 0, 1))


def check_reduce(table: TableWriter, *, k: int = 1) -> None:
    """Check that a table for two ranks is a reduce to rank 0, and that its program is right too."""
    schedule = table.build("reduce", "by hand", 2, slots_per_block=k, scratch=2)
    verify(schedule)
    inputs = random_inputs(schedule, 4)
    for seed in range(4):
        got = execute(schedule, project_all(schedule), inputs, seed=seed, shared=False)
        assert np.array_equal(got[0], inputs[0] + inputs[1])


def test_a_copy_whose_source_changes_is_made() -> None:
    table = TableWriter()
    table.add_moves(0, 0, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_moves(1, 0, 0, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, 1))
    table.add_moves(2, 1, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_reductions(3, 1, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 1))
    table.add_moves(4, 0, 0, (Buffer.SCRATCH, 1), (Buffer.OUT, 0))
    check_reduce(table)


def test_copies_from_several_places_are_made() -> None:
    table = TableWriter()
    table.add_moves(0, 0, 0, (Buffer.IN, 1), (Buffer.SCRATCH, 1))
    table.add_moves(1, 0, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 2))
    table.add_moves(1, 0, 0, (Buffer.SCRATCH, 1), (Buffer.SCRATCH, 3))
    table.add_reductions(2, 1, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 2), count=2)
    table.add_moves(3, 0, 0, (Buffer.SCRATCH, 2), (Buffer.OUT, 0), count=2)
    check_reduce(table, k=2)


@pytest.mark.parametrize("collects", [True, False])
def test_projecting_leaves_the_garbage_collector_as_it_was(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        project_all(generate("all_reduce", "ring", 4))
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_projecting_goes_on_without_collections_after_another_pause_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    collects = list[bool]()

    def find_after_its_end(*args: Any) -> Any:
        if not collects:
            paused_garbage_collector.__exit__()
        collects.append(gc.isenabled())
        return find_waits(*args)

    monkeypatch.setattr("overlap.collectives.program.find_waits", find_after_its_end)
    paused_garbage_collector.__enter__()
    project_all(generate("all_reduce", "ring", 4))
    assert {*collects} == {False}
    assert gc.isenabled()
