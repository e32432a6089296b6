"""The same program leaves the same bytes in its trace file, whatever the order in which Trio runs its tasks."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import trio
from trio._core import _run

import overlap
from overlap import Conditions, Interference

CONDITIONS = Conditions(seed=3, jitter=0.05, straggler_share=0.2, straggler_factor=1.5, slow_wire_share=0.1,
                        slow_wire_factor=0.5)  # fmt: skip


async def busy(rank):
    """Compute and communicate in every way, from several tasks, with much of it in one instant."""
    first = rank.rank // 4 * 4
    tensor = rank.group(range(first, first + 4), name="tp")
    urgent = rank.stream("tp", priority=-1)
    log = []

    async def side(number):
        await trio.sleep(1e-4 * (number % 2))
        log.append(number)
        rank.compute(lambda: None, seconds=1e-4 * (number + 1), name=f"side {number}")

    for step in range(2):
        with rank.step(step):
            async with trio.open_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(side, number)
            pending = []
            for layer in range(3):
                grad = rank.compute(np.full, 1 << 10, rank.rank, seconds=1e-4, name=f"layer {layer}")
                pending.append(rank.all_reduce(grad, op="mean"))
                pending.append(tensor.all_gather(np.ones(1 << 10), stream=urgent))
            rank.send(np.ones(1 << 9), (rank.rank + 1) % 8, tag=step)
            pending.append(rank.recv(((1 << 9,), np.float64), (rank.rank - 1) % 8, tag=step))
            for each in pending:
                await each
    with trio.move_on_after(1e-3):
        await trio.sleep(1)
    await rank.barrier()
    return sorted(log)


def trace_of(path, **assumed):
    overlap.run(busy, ranks=8, cluster="trn1.32xlarge", clock=overlap.Virtual(**assumed), trace=path)
    return path.read_bytes()


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("assumed", "runs"),
    [({}, 10), ({"conditions": CONDITIONS}, 10), pytest.param({}, 100, marks=pytest.mark.slow)],
    ids=["calm", "rough", "calm, a hundred times"],
)
def test_the_same_bytes_every_time(tmp_path, assumed, runs):
    expected = trace_of(tmp_path / "first.json", **assumed)
    assert expected.count(b'"name":"side 1"') == 16
    for _ in range(runs - 1):
        assert trace_of(tmp_path / "again.json", **assumed) == expected


@pytest.mark.everyday(1)
@pytest.mark.parametrize("direction", ["forwards", "backwards", "shuffled"])
@pytest.mark.parametrize("rough", [False, True])
def test_trios_order_does_not_matter(tmp_path, monkeypatch, direction, rough):
    interference = Interference(compute={"*": 1.2}, communication={"*": 1.1})
    assumed = {"conditions": CONDITIONS, "interference": interference} if rough else {}
    expected = trace_of(tmp_path / "first.json", **assumed)
    rng = random.Random(1)
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", direction == "shuffled")
    order = SimpleNamespace(random=lambda: float(direction == "forwards"), shuffle=rng.shuffle)
    monkeypatch.setattr(_run, "_r", order)
    for _ in range(2):
        assert trace_of(tmp_path / "again.json", **assumed) == expected


@pytest.mark.parametrize("direction", [0.0, 1.0])
def test_functions_run_by_rank_whatever_the_order(monkeypatch, direction):
    """So a program whose ranks share something, such as a random generator, gives the same results again."""
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", False)
    monkeypatch.setattr(_run, "_r", SimpleNamespace(random=lambda: direction))
    drawn = random.Random(5)

    async def main(rank):
        return [await rank.compute(drawn.random, seconds=1e-3) for _ in range(3)]

    again = random.Random(5)
    expected = [[again.random() for _ in range(4)] for _ in range(3)]
    assert overlap.run(main, ranks=4, clock="virtual") == [list(column) for column in zip(*expected, strict=True)]


@pytest.mark.parametrize("direction", [0.0, 1.0])
def test_tasks_of_a_rank_compute_in_the_order_they_were_started(monkeypatch, direction):
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", False)
    monkeypatch.setattr(_run, "_r", SimpleNamespace(random=lambda: direction))
    ran = []

    async def side(rank, number):
        await trio.sleep(1e-3)
        rank.compute(ran.append, number, seconds=1e-3)
        rank.compute(ran.append, 10 + number, seconds=1e-3)

    async def main(rank):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(side, rank, number)

    overlap.run(main, ranks=1, clock="virtual")
    assert ran == [0, 10, 1, 11, 2, 12]
