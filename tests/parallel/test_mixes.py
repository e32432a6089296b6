"""Pipeline, data and tensor parallel at once, on a mesh; and how much of 64 ranks' traffic hides behind compute."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import ColumnLinear, Pipeline, RowLinear, Sequential, schedules
from tests.errors import error_of
from tests.parallel import blocks as b
from tests.runtime.companies import by_sockets, run_far
from tests.runtime.worlds import run
from tests.simulation.worlds import simulate

from .deep import MB, NAMES, spans_of, steady

# -- pipeline, data and tensor parallel at once, on a mesh: what one rank learns from the global batch -----------------

STEPS, MICROBATCHES = 3, 4
OPTIMIZERS = {"sgd": parallel.SGD(b.LR), "adam": parallel.Adam(1e-2)}
MESHES = {
    "pp=2 dp=2 tp=2": ({"pp": 2, "dp": 2, "tp": 2}, "1f1b"),
    "tp=2 pp=2 dp=2": ({"tp": 2, "pp": 2, "dp": 2}, "zb-h1"),
    "pp=2 tp=2": ({"pp": 2, "dp": 1, "tp": 2}, "interleaved-1f1b"),
    "dp=2 tp=2": ({"pp": 1, "dp": 2, "tp": 2}, "gpipe"),
    "pp=2 dp=2": ({"pp": 2, "dp": 2, "tp": 1}, "zb-h1"),
}


MODELS = {
    "data parallel": parallel.DataParallel,
    "zero 2": partial(parallel.Sharded, stage=2),
    "zero 3": partial(parallel.Sharded, stage=3),
}


async def train(
    rank: overlap.Rank, axes: dict[str, int], name: str, optimizer: str, kind: str = "data parallel"
) -> tuple[list[float], Any]:
    mesh = rank.mesh(**axes)
    pp, dp, tp = mesh["pp"], mesh["dp"], mesh["tp"]
    schedule = schedules.make(name, ranks=pp.size, microbatches=MICROBATCHES)
    rows = b.ROWS // dp.size
    tokens = rows // MICROBATCHES // 2
    layers = {
        "up": ColumnLinear(rank, tp, b.WIDTH, b.HIDDEN, tokens=tokens),
        "act": b.act(rank),
        "down": RowLinear(rank, tp, b.HIDDEN, b.WIDTH, tokens=tokens),
    }
    params: dict[int, Any] = {}
    for stage in schedule.stages_of(pp.rank):
        whole = b.block(10 * stage)
        params[stage] = {name: layers[name].shard(whole[name]) if whole[name] else {} for name in layers}
    model = MODELS[kind](rank, params, optimizer=OPTIMIZERS[optimizer], group=dp)
    pipeline = Pipeline(
        rank, schedule, dict.fromkeys(params, Sequential(rank, layers, parts=2)), params,
        loss=b.square_loss, loss_cost={"seconds": 0}, boundary=((rows // MICROBATCHES, b.WIDTH), np.float64),
        group=pp, model=model,
    )  # fmt: skip
    passed = []
    for step in range(STEPS):
        with rank.step(step):
            mine = slice(dp.rank * rows, (dp.rank + 1) * rows)
            x, target = b.batch(step)
            passed.append(await pipeline.run(x[mine], target[mine]))
            model.step()
    learnt = await model.finish()
    losses = [await each.loss() for each in passed]
    return (await dp.all_reduce(np.array(losses), op="mean")).tolist(), learnt


def one_ranks_parts(axes: dict[str, int], stages: int, rank: int, optimizer: str) -> tuple[list[float], Any]:
    """What a rank of the mesh must have: its parts of what one rank learns from the whole batch."""
    weights, losses = b.one_rank(stages, STEPS, optimizer=OPTIMIZERS[optimizer])
    places = dict(zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True))
    size, mine = axes["tp"], places["tp"]
    parts = {
        str(stage): {
            "up": {name: np.split(each, size, -1)[mine] for name, each in weights[stage]["up"].items()},
            "act": {},
            "down": weights[stage]["down"] | {"weight": np.split(weights[stage]["down"]["weight"], size)[mine]},
        }
        for stage in range(places["pp"], stages, axes["pp"])
    }
    return losses, parts


def learnt_alone(found: list[Any], axes: dict[str, int], name: str, optimizer: str) -> bool:
    stages = axes["pp"] * (2 if name.startswith("interleaved") else 1)
    return all(
        b.close(
            [losses, {str(stage): w for stage, w in learnt.items()}], one_ranks_parts(axes, stages, rank, optimizer)
        )
        for rank, (losses, learnt) in enumerate(found)
    )


CELLS = [(clock, mesh, "adam", "data parallel") for clock in ("real", "virtual", "sockets") for mesh in MESHES]
CELLS += [("real", mesh, "sgd", "data parallel") for mesh in MESHES]
CELLS += [("real", "pp=2 dp=2 tp=2", "adam", kind) for kind in ("zero 2", "zero 3")]


@pytest.mark.parametrize(("clock", "mesh", "optimizer", "kind"), CELLS)
def test_a_mesh_learns_what_one_rank_learns(clock: str, mesh: str, optimizer: str, kind: str) -> None:
    axes, name = MESHES[mesh]
    ranks = int(np.prod(list(axes.values())))
    if clock == "sockets":
        found = run_far(train, 2, ranks // 2, axes, name, optimizer, kind, wires=by_sockets)
    elif clock == "virtual":
        found, _ = simulate(train, ranks, axes, name, optimizer, kind)
    else:
        found = run(train, ranks, axes, name, optimizer, kind)
    assert learnt_alone(found, axes, name, optimizer)


def test_models_are_told_apart_by_name() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        w = {"a": np.ones(2)}
        model = parallel.DataParallel(rank, w, optimizer=parallel.SGD(0.1))
        told = []
        for wrong in (lambda: parallel.Models((model, w), (model, w)), lambda: parallel.Models((model, w))["b"]):
            told.append(str(error_of(overlap.UsageError, wrong)))
        return told

    want = ["models: two of them have a parameter 'a'; rename one", "name: 'b' is no parameter; known are a"]
    assert run(main, 1) == [want]


# -- how much hides behind compute, in virtual time: of a model of 32 layers on 64 ranks of a trn2 ---------------------


@pytest.mark.everyday(1)
@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "bounded"])
@pytest.mark.parametrize(("seconds", "nbytes"), [(0.010, 400 * MB), (0.0005, 32 * MB)])
def test_where_computing_takes_longer_communication_is_hidden(waits, seconds, nbytes):
    row = steady(spans_of(seconds, nbytes, waits))
    assert row.compute_ns > row.comm_ns
    assert row.compute_ns >= 0.98 * row.wall_ns
    assert row.idle_ns == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "nbytes"), [(0.00001, 32 * MB), pytest.param(0.0001, 400 * MB, marks=pytest.mark.slow)]
)
def test_weights_that_forward_needs_first_overtake(seconds, nbytes):
    """Where the wire is the limit, forward begins with the first weights instead of waiting for all."""
    spans = spans_of(seconds, nbytes)
    assert steady(spans).comm_ns > steady(spans).compute_ns
    assert steady(spans).comm_ns >= 0.98 * steady(spans).wall_ns
    assert not waits_for_last_bucket(spans)


def waits_for_last_bucket(spans):
    """Whether the second step's forward begins only when all gradients of the first step have been reduced."""
    begins_ns = min(span.start_ns for span in spans if span.name == f"forward {NAMES[0]}" and span.step == 1)
    ends_ns = max(span.end_ns for span in spans if span.name.startswith("bucket") and span.step == 0)
    return begins_ns >= ends_ns


def test_a_gradient_travels_while_the_layers_below_compute():
    spans = spans_of(0.010, 400 * MB)
    first = next(span for span in spans if span.name == "bucket 0" and span.step == 2)
    deepest, next_one = (
        next(span for span in spans if span.name == f"backward {NAMES[i]}" and span.step == 2) for i in (-1, -2)
    )
    assert deepest.end_ns <= first.start_ns < next_one.end_ns
