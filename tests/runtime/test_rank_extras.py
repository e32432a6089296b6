"""What a rank has beside its program: tasks, groups whose operations take another stream, random numbers."""

from functools import partial

import numpy as np
import pytest
import trio

import overlap
from overlap.config import overriding_config
from tests.errors import error_of

from .worlds import TIMEOUT_S, failure_of


def run(main, ranks=2):
    return overlap.run(main, ranks=ranks, timeout_s=TIMEOUT_S)


def test_a_task_runs_beside_the_program_and_its_future_can_be_passed_on():
    async def summed(group, x):
        return await group.all_reduce(x)

    async def main(rank):
        task = rank.spawn(summed, rank.world, np.array([rank.rank + 1.0]))
        doubled = rank.compute(lambda x: 2 * x, task)
        return (await doubled).tolist()

    assert run(main) == [[6.0], [6.0]]


def test_an_error_of_a_task_that_nobody_awaits_fails_the_rank():
    async def bad():
        raise ValueError("no")

    async def main(rank):
        if rank.rank == 1:
            rank.spawn(bad)

    failure = failure_of(run, main)
    assert (failure.rank, str(failure.__cause__)) == (1, "no")


def test_a_rank_waits_for_its_tasks():
    async def late(rank, done):
        await rank.barrier()
        done.append(rank.rank)

    async def main(rank, done):
        rank.spawn(late, rank, done)

    done = []
    overlap.run(main, done, ranks=3, timeout_s=TIMEOUT_S)
    assert sorted(done) == [0, 1, 2]


def test_what_a_task_issues_is_of_the_step_in_which_it_was_spawned():
    """As the operations of hooks, which begin when the program is a step further."""

    async def later(rank, begun):
        await begun.wait()
        await rank.all_reduce(np.ones(1), name="of the task")

    async def main(rank):
        begun = trio.Event()
        with rank.step(0):
            task = rank.spawn(later, rank, begun)
        with rank.step(1):
            begun.set()
            await rank.all_reduce(np.ones(1), name="of the program")
            await task
        await rank.barrier()

    seen = []
    with overriding_config(watcher=seen.append):
        run(main)
    steps = {(span.name, span.step) for span in seen[0].spans if span.kind == "comm"}
    assert steps == {("of the task", 0), ("of the program", 1), ("barrier", None)}


def test_a_world_within_a_step_of_another_has_steps_of_its_own():
    seen = []

    async def inner(rank):
        await rank.all_reduce(np.ones(1))

    async def main(rank):
        with rank.step(7):
            await trio.to_thread.run_sync(lambda: overlap.run(inner, ranks=1, timeout_s=TIMEOUT_S))

    with overriding_config(watcher=seen.append):
        run(main, 1)
    assert {span.step for timeline in seen for span in timeline.spans if span.kind == "comm"} == {None}


@pytest.mark.parametrize("wrong", [7, None])
def test_what_is_no_function_is_refused(wrong):
    async def main(rank):
        return str(error_of(overlap.UsageError, rank.spawn, wrong))

    kind = type(wrong).__name__
    advice = "pass the function itself: rank.spawn(f, x), not rank.spawn(f(x))"
    assert run(main, 1) == [f"fn: expected an async function, got {kind}; {advice}"]


async def sleeps(rank):
    await trio.sleep(rank)


@pytest.mark.parametrize("function", [sleeps, partial(sleeps, 1)])
def test_a_compute_of_an_async_function_is_refused_by_its_name(function):
    async def main(rank):
        return str(error_of(overlap.UsageError, rank.compute, function))

    (told,) = run(main, 1)
    assert told.startswith("fn: expected a plain function, got the async function ")
    assert "sleeps" in told


def test_a_group_on_a_stream_numbers_its_operations_with_those_of_the_stream():
    async def main(rank):
        rank.stream("other")
        other = rank.world.on("other")
        on_it = [other.all_reduce(np.ones(1)), rank.all_reduce(np.ones(1), stream="other"), other.barrier()]
        beside = rank.all_reduce(np.ones(1))
        for future in [*on_it, beside]:
            await future
        return [future.seq for future in on_it], beside.seq

    assert run(main) == [([0, 1, 2], 0)] * 2


def test_operations_of_groups_on_different_streams_may_come_in_any_order():
    async def main(rank):
        groups = [rank.world.on(rank.stream(f"s{i}", window=1)) for i in range(3)]
        order = (0, 1, 2) if rank.rank else (2, 1, 0)
        futures = {i: groups[i].all_reduce(np.array([float(i)])) for i in order}
        return [(await futures[i]).tolist() for i in range(3)]

    assert run(main) == [[[0.0], [2.0], [4.0]]] * 2


def test_each_rank_has_random_numbers_of_its_own_which_are_the_same_in_every_run():
    async def main(rank):
        return [rank.rng.random() for _ in range(3)]

    drawn = run(main, 3)
    assert drawn == [np.random.default_rng((0, rank)).random(3).tolist() for rank in range(3)]
    assert drawn[0] != drawn[1]
