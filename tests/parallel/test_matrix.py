"""Strategy x option x clock: many ranks learn what one learns in plain numpy, bit by bit where that holds."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import hooks
from transports import NeuronLink, Recording

from ..runtime.companies import by_sockets, run_far
from .example_hooks import float8, power_sgd, top_k
from .programs import backward, forward, loss_gradient, samples, weights

RANKS, LAYERS, WIDTH = 3, 4, 5  # layers of 25 elements: shares of buckets are uneven
STRATEGIES = {
    "DataParallel": parallel.DataParallel,
    "Sharded1": lambda rank, params, **options: parallel.Sharded(rank, params, stage=1, **options),
    "Sharded2": lambda rank, params, **options: parallel.Sharded(rank, params, stage=2, **options),
    "Sharded3": lambda rank, params, **options: parallel.Sharded(rank, params, stage=3, **options),
}
SHARDED = list(STRATEGIES)[1:]


async def own_mean(bucket):
    first = await bucket.group.all_reduce(bucket.buffer, op="sum")
    return bucket.group.all_reduce(first / bucket.group.size, op="max")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to train, and how near the result is to that of one rank, and of the other strategies."""

    arguments: dict[str, Any] = field(default_factory=dict)  # Arguments of the strategy
    hook: Any = None  # Makes a hook
    steps: tuple[int, ...] = (6, 6, 6, 6)  # Of each rank
    micro: int = 1  # Batches in a step, of which the last travels
    skips: bool = False  # Whether some ranks have no gradient of some weights
    awaits: str = ""  # What the loop waits for: "steps", "computes" or nothing
    dtype: Any = np.float64
    only: tuple[str, ...] = tuple(STRATEGIES)
    as_plain: bool = False  # Whether the bits are those of the option "plain"
    differs: tuple[str, ...] = ()  # Strategies that add up in another order than DataParallel does
    near: float = 1e-10  # Relative distance from one rank
    algorithm: str | None = None


def plain(**more):
    return Option(as_plain=True, **more)


OPTIONS = {
    "plain": Option(),
    "in_flight=1": plain(arguments={"in_flight": 1}),
    "rebuild_buckets=False": plain(arguments={"rebuild_buckets": False}),
    "ahead=0": plain(arguments={"ahead": 0}, awaits="steps"),
    "awaits=computes": plain(awaits="computes"),
    "bucket_bytes=1": plain(arguments={"bucket_bytes": 1}),
    "bucket_bytes=1MiB": plain(arguments={"bucket_bytes": 1 << 20}),
    "depth=0": plain(arguments={"depth": 0}, only=("Sharded3",)),
    "depth=3": plain(arguments={"depth": 3}, only=("Sharded3",)),
    "exact": plain(arguments={"exact": True}),
    "exact,ring": plain(arguments={"exact": True, "bucket_bytes": 1}, algorithm="ring"),
    "hook=mean": plain(hook=lambda: own_mean),
    "momentum": Option(arguments={"optimizer": parallel.SGD(0.1, momentum=0.9)}),
    "Adam": Option(arguments={"optimizer": parallel.Adam(1e-2)}),
    "AdamW": Option(arguments={"optimizer": parallel.AdamW(1e-2)}),
    "float32": Option(dtype=np.float32, near=1e-5),
    "clip_norm": Option(arguments={"clip_norm": 0.2}, differs=tuple(SHARDED)),
    "micro": Option(micro=2, differs=("Sharded2", "Sharded3")),
    "micro,clip_norm": Option(micro=2, arguments={"clip_norm": 0.2}, differs=tuple(SHARDED)),
    "uneven": Option(arguments={"uneven": True}, steps=(1, 4, 2, 3)),
    "uneven,micro": Option(arguments={"uneven": True}, steps=(1, 4, 2, 3), micro=2, differs=("Sharded2", "Sharded3")),
    "unused=zeros": Option(arguments={"unused": "zeros"}, skips=True),
    "hook=bfloat16": Option(hook=hooks.bfloat16, dtype=np.float32, near=0.02),
    "hook=stochastic": Option(
        hook=lambda: hooks.bfloat16("stochastic"), dtype=np.float32, near=0.02, differs=tuple(SHARDED)
    ),
    "hook=float16": Option(hook=hooks.float16, dtype=np.float32, near=0.002),
    "hook=float8": Option(hook=float8, dtype=np.float32, near=0.1),
    "hook=top_k": Option(hook=lambda: top_k(0.5), dtype=np.float32, near=0.2),
    "hook=power_sgd": Option(hook=lambda: power_sgd(1, warm_up=1), dtype=np.float32, near=0.2),
}
CELLS = [
    pytest.param(strategy, name, id=f"{strategy}-{name}")
    for name, option in OPTIONS.items()
    for strategy in option.only
]


def skipped(option, rank, step, name):
    return option.skips and (rank + step + int(name[1])) % 3 == 0


async def train(rank, strategy, option):
    """The loop of users; every rank brings other weights, of which those of rank 0 count."""
    params = weights(LAYERS, WIDTH, option.dtype, seed=rank.rank)
    defaults = {"optimizer": parallel.SGD(0.1), "bucket_bytes": 300, "hook": option.hook and option.hook()}
    model = STRATEGIES[strategy](rank, params, **defaults | option.arguments)
    for step in range(option.steps[rank.rank]):
        for part in range(option.micro):
            x, y = samples(step * option.micro + part, rank.world_size, WIDTH, option.dtype)[
                :, rank.rank :: rank.world_size
            ]
            acts = {}
            for name in params:
                acts[name], x = x, rank.compute(forward, model[name], x, seconds=0.001)
                x = await x if option.awaits == "computes" else x
            grad = rank.compute(loss_gradient, x, y, seconds=0.001)
            with model.no_sync() if part < option.micro - 1 else nullcontext():
                for name in reversed(params):
                    back = rank.compute(backward, model[name], acts[name], grad, seconds=0.001)
                    grad = back[0]
                    if not skipped(option, rank.rank, step, name):
                        model.reduce(name, back[1])
        made = model.step()
        if option.awaits == "steps":
            await made
        elif option.awaits:
            await model.finish()
    return {name: w.copy() for name, w in (await model.finish()).items()}, model.steps


@cache
def serial(option_name, ranks):
    """The same training by one rank, in plain numpy."""
    option = OPTIONS[option_name]
    params = weights(LAYERS, WIDTH, option.dtype, seed=0)
    optimizer = option.arguments.get("optimizer", parallel.SGD(0.1))
    state = {name: optimizer.fresh(w.size, w.dtype) for name, w in params.items()}
    for step in range(max(option.steps[:ranks])):
        active = [rank for rank in range(ranks) if step < option.steps[rank]]
        means = {name: np.zeros_like(w) for name, w in params.items()}
        for rank in active:
            for part in range(option.micro):
                x, y = samples(step * option.micro + part, ranks, WIDTH, option.dtype)[:, rank::ranks]
                acts = []
                for w in params.values():
                    acts.append(x)
                    x = forward(w, x)
                grad = loss_gradient(x, y)
                for name, act in zip(reversed(params), reversed(acts), strict=True):
                    grad, dw = backward(params[name], act, grad)
                    means[name] += 0 if skipped(option, rank, step, name) else dw / len(active)
        factor = 1.0
        if "clip_norm" in option.arguments:
            norm = np.sqrt(sum((mean**2).sum() for mean in means.values()))
            factor = min(1.0, option.arguments["clip_norm"] / (norm + 1e-6))
        for name, w in params.items():
            optimizer.update(w.reshape(-1), (factor * means[name]).reshape(-1), state[name], step + 1)
    return params


def common(results, option):
    """Return the weights, once all ranks have the same bits of them and have counted the same steps."""
    for found, steps in results:
        assert steps == max(option.steps[: len(results)])
        assert {name: w.tobytes() for name, w in found.items()} == {n: w.tobytes() for n, w in results[0][0].items()}
    return results[0][0]


@cache
def trained(strategy, option_name, clock, ranks=RANKS):
    option = OPTIONS[option_name]
    algorithm = option.algorithm if clock == "real" else None
    results = overlap.run(train, strategy, option, ranks=ranks, clock=clock, algorithm=algorithm, timeout_s=60)
    return common(results, option)


def bits(found):
    return [(name, w.tobytes()) for name, w in found.items()]


def assert_near(found, option_name, ranks):
    for name, w in serial(option_name, ranks).items():
        assert found[name].dtype == w.dtype
        np.testing.assert_allclose(found[name], w, rtol=OPTIONS[option_name].near, atol=OPTIONS[option_name].near)


@pytest.mark.everyday(32)
@pytest.mark.parametrize(("strategy", "name"), CELLS)
def test_ranks_together_learn_what_one_learns_alone(clock, strategy, name):
    found, option = trained(strategy, name, clock), OPTIONS[name]
    assert_near(found, name, RANKS)
    if strategy not in option.differs:
        same = "plain" if option.as_plain else name
        assert bits(found) == bits(trained("DataParallel", same, clock))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_alone(strategy):
    """It averages with nobody, and its norm is its own."""
    for name in ("Adam", "micro,clip_norm"):
        assert_near(trained(strategy, name, "real", 1), name, 1)


DAILY = {*((strategy, "Adam") for strategy in STRATEGIES), ("Sharded3", "exact,ring")}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [pytest.param(*cell.values, id=cell.id, marks=() if cell.values in DAILY else pytest.mark.slow) for cell in CELLS],
)
def test_between_two_processes_over_sockets(strategy, name):
    """A ring adds up in another order there, unless sums are exact; of narrow types the last bits differ."""
    option = OPTIONS[name]
    found = common(run_far(train, 2, 2, strategy, option, wires=by_sockets), option)
    near = trained("DataParallel", "plain" if option.as_plain else name, "real", 4)
    if "exact" in option.arguments:
        assert bits(found) == bits(near)
    close = {"rtol": 1e-2, "atol": 1e-3} if option.dtype == np.float32 else {"rtol": 1e-10, "atol": 1e-13}
    for parameter, w in near.items():
        np.testing.assert_allclose(found[parameter], w, **close)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["in_flight=1", "ahead=0", "rebuild_buckets=False", "exact,ring"])
def test_after_fifty_steps(strategy, name):
    long = replace(OPTIONS[name], steps=(50,) * 4, dtype=np.float32)
    base = replace(OPTIONS["plain"], steps=(50,) * 4, dtype=np.float32)
    found, expected = (
        common(overlap.run(train, s, o, ranks=4, algorithm=o.algorithm, timeout_s=60), o)
        for s, o in ((strategy, long), ("DataParallel", base))
    )
    assert bits(found) == bits(expected)


# -- exact sums ------------------------------------------------------------------------------------------------------


def test_without_exact_a_ring_adds_up_otherwise():
    """Else the cells of `exact` would show nothing."""
    ring = overlap.run(train, "DataParallel", OPTIONS["plain"], ranks=4, algorithm="ring", timeout_s=60)
    assert bits(ring[0][0]) != bits(trained("DataParallel", "plain", "real", 4))


def test_wires_do_not_matter_to_exact_sums():
    option = OPTIONS["exact"]
    wired = overlap.run(train, "DataParallel", option, ranks=4, transport=Recording(NeuronLink(4)), timeout_s=60)
    assert bits(wired[0][0]) == bits(trained("DataParallel", "exact", "real", 4))


# -- the matrix itself -----------------------------------------------------------------------------------------------


def test_options_do_something():
    """Each option that is not as plain has other bits than plain; clipping and skipping take effect."""
    plain_bits = bits(trained("DataParallel", "plain", "virtual"))
    others = [name for name, option in OPTIONS.items() if not option.as_plain and name != "plain"]
    assert Counter(bits(trained("DataParallel", name, "virtual")) == plain_bits for name in others) == {
        False: len(others)
    }
