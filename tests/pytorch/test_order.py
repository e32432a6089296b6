"""Modules whose gradients come in other orders on other ranks: each gets its own mean, or every rank an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import overlap  # noqa: E402

from .pairs import connected, do  # noqa: E402
from .swapped import Two, trained  # noqa: E402
from .test_modules import KINDS, Store, refused  # noqa: E402

SGD = partial(torch.optim.SGD, lr=1.0)
KINDS_OF_ANY_ORDER = [kind for kind in KINDS if kind != "stage 3"]


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[overlap.Connection]]:
    with connected(3, Store()) as three:
        for world in three:
            world.rank.compute(lambda: None).result()
        yield three


@pytest.fixture(autouse=True)
def _opened_before_the_census(worlds: Any) -> None:
    pass


def each(worlds: list[overlap.Connection], program: Callable[..., Any], *args: Any) -> list[Any]:
    return do([partial(program, world.rank, *args) for world in worlds])


@pytest.mark.parametrize("kind", KINDS_OF_ANY_ORDER)
def test_each_parameter_gets_its_own_mean(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> list[float]:
        return trained(KINDS[kind], rank, steps=3, swaps=rank.rank == 1, factor=rank.rank)

    assert each(worlds, program) == [[-6.0, -33.0]] * 3  # 3 steps; the mean of 1, 2, 3, and of 10, 11, 12


@pytest.mark.parametrize("kind", KINDS_OF_ANY_ORDER)
def test_an_order_that_changes_from_step_to_step(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> list[float]:
        model = KINDS[kind](Two(8), SGD, rank=rank, bucket_bytes=1)
        for step in range(4):
            model(torch.ones(1, 8), swaps=(step + rank.rank) % 2 == 1).backward()
            model.step()
        module = model.finish()
        return [module.a.weight[0, 0].item(), module.b.weight[0, 0].item()]

    assert each(worlds, program) == [[-4.0, -40.0]] * 3


@pytest.mark.parametrize("kind", KINDS_OF_ANY_ORDER)
def test_several_backwards_and_unused_parameters(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> list[float]:
        net = Two(8)
        net.register_parameter("unused", nn.Parameter(torch.ones(64)))
        model = KINDS[kind](net, SGD, rank=rank, bucket_bytes=1, unused="zeros")
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(1, 8), swaps=rank.rank == 2).backward()
            model(torch.ones(1, 8), swaps=rank.rank == 1).backward()
            model.step()
        module = model.finish()
        return [module.a.weight[0, 0].item(), module.b.weight[0, 0].item(), module.unused[0].item()]

    assert each(worlds, program) == [[-4.0, -40.0, 1.0]] * 3


def test_stage_3_names_both_orders_on_every_rank(worlds: list[overlap.Connection]) -> None:
    def program(rank: overlap.Rank) -> str:
        model = KINDS["stage 3"](Two(8), SGD, rank=rank, bucket_bytes=1)
        model(torch.ones(1, 8), swaps=rank.rank == 1).backward()
        model.step()
        return refused(lambda: model(torch.ones(1, 8)))

    expected = (
        "stage=3 needs one order of modules on all ranks, and forward differs: rank 0 has a.weight, b.weight; rank 1 "
        "has b.weight, a.weight; use stage=2, or call the modules in one order"
    )
    assert each(worlds, program) == [expected] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_usual_order_no_bucket_waits(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank, swaps: bool) -> list[str]:
        model, events = KINDS[kind](Two(8), SGD, rank=rank, bucket_bytes=1), []
        for name in ("a", "b"):
            parameter = getattr(model.module, name).weight
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        send = model._send
        model._send = lambda bucket: (events.append(f"send {bucket.plan.names[0]}"), send(bucket))
        for _ in range(2):
            model(torch.ones(1, 8), swaps=swaps).backward()
            model.step()
        model.finish()
        return events

    usual = ["send b.weight", "b", "send a.weight", "a"]  # the model's hook of a gradient comes before this test's
    assert each(worlds, program, False) == [usual * 2] * 3
    # In the other order the first step holds a bucket back, and later ones do not: all ranks have learnt it.
    learnt = ["a", "send b.weight", "send a.weight", "b", "send a.weight", "a", "send b.weight", "b"]
    assert each(worlds, program, True) == [learnt] * 3


@pytest.mark.slow
def test_under_torchrun() -> None:
    program = str(Path(__file__).with_name("swapped.py"))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "[[-1.0, -10.0], [-1.0, -10.0]]\n"), ended.stderr
