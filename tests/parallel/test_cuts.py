"""Checkpoints of models that no rank holds alone, and that other ranks cut otherwise."""

from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file

import overlap
from overlap import parallel
from tests.errors import error_of

ADAM = parallel.Adam(1e-2)
LAYERS, WIDTH = 4, 8
SHAPES = {"up.weight": (WIDTH, 2 * WIDTH), "up.bias": (2 * WIDTH,), "down.weight": (2 * WIDTH, WIDTH), "gain": (WIDTH,)}
AXES = {"up.weight": 1, "up.bias": 0, "down.weight": 0}


def whole(seed, scale=1.0):
    """Return arrays of the shapes of the whole model's weights."""
    rng = np.random.default_rng(seed)
    shapes = {f"layer{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def cuts_of(mesh):
    """Return the cuts of a rank, whose layers are numbered from 0 on every stage."""
    stages, tp = mesh["pp"], mesh["tp"]
    each = LAYERS // stages.size
    return {
        f"{i}.{name}": parallel.Cut(f"layer{stages.rank * each + i}.{name}", AXES[name], tp.rank, tp.size)
        if name in AXES
        else parallel.Cut(f"layer{stages.rank * each + i}.{name}")
        for i in range(each)
        for name in SHAPES
    }


def make(rank, axes, strategy, seed):
    mesh = rank.mesh(**axes)
    cuts = cuts_of(mesh)
    params = {name: cut.block(value).copy() for name, cut in cuts.items() for value in [whole(seed)[cut.name]]}
    options = {"optimizer": ADAM, "group": mesh["dp"], "bucket_bytes": 300}
    kind = parallel.DataParallel if strategy == "data" else parallel.Sharded
    return cuts, kind(rank, params, **options)


async def train(rank, folder, axes, strategy, until, **options):
    """Go on until a step and save; return the weights at the start and at the end, by their names in the whole model.

    Adam works element by element, so whatever the cuts, the bits are the same.
    """
    cuts, model = make(rank, axes, strategy, seed=rank.rank)
    checkpoints = parallel.Checkpoints(rank, folder, cuts=cuts, **options)
    restored = await checkpoints.restore(model)
    if not restored:
        cuts, model = make(rank, axes, strategy, seed=0)
    for step in range(model.steps, until):
        gradients = whole(100 + step)
        for name in reversed(cuts):
            model.reduce(name, cuts[name].block(gradients[cuts[name].name]).copy())
        model.step()
    await checkpoints.save(model)
    await checkpoints.finish()
    return restored, {cuts[name]: value.copy() for name, value in (await model.finish()).items()}


def trained(ranks, *args, **options):
    """Train, and put the whole model together."""
    found = overlap.run(partial(train, **options), *args, ranks=ranks, timeout_s=60)
    total = {name: np.full_like(value, np.nan) for name, value in whole(0).items()}
    for _, weights in found:
        for cut, value in weights.items():
            cut.block(total[cut.name])[...] = value
    return [restored for restored, _ in found], {name: value.tobytes() for name, value in total.items()}


ONE = {"pp": 1, "dp": 1, "tp": 1}


@pytest.mark.parametrize(
    ("ranks", "axes", "strategy"),
    [
        (1, ONE, "data"),
        (4, {"pp": 1, "dp": 1, "tp": 4}, "sharded"),
        (4, {"pp": 4, "dp": 1, "tp": 1}, "data"),
        (4, {"pp": 1, "dp": 2, "tp": 2}, "sharded"),
    ],
)
def test_a_model_that_was_cut_goes_on_however_it_is_cut(tmp_path, capsys, ranks, axes, strategy):
    _, through = trained(1, tmp_path / "through", ONE, "data", 5)
    trained(4, tmp_path / "run", {"pp": 2, "dp": 1, "tp": 2}, "sharded", 3)
    restored, found = trained(ranks, tmp_path / "run", axes, strategy, 5)
    assert found == through
    if ranks == 1:
        why = "4 ranks saved it and 1 go on, and gradients that are means of other parts round differently"
    else:
        why = "its ranks had other blocks of the model, and sums of other blocks round differently"
    assert {(each.step, each.exact, each.why) for each in restored} == {(3, False, why)}
    assert capsys.readouterr().err.count(why) == 1


def test_the_same_cuts_go_on_exactly(tmp_path):
    axes = {"pp": 2, "dp": 2, "tp": 1}
    _, through = trained(4, tmp_path / "through", axes, "sharded", 5)
    trained(4, tmp_path / "run", axes, "sharded", 3)
    restored, found = trained(4, tmp_path / "run", axes, "sharded", 5)
    assert found == through
    assert {(each.step, each.exact, each.why) for each in restored} == {(3, True, "")}


def test_a_model_that_was_whole_is_cut_and_put_together(tmp_path):
    """Who has all of it needs no cuts."""
    _, through = trained(2, tmp_path / "through", {"pp": 1, "dp": 1, "tp": 2}, "data", 4)

    async def alone(rank, until):
        model = parallel.DataParallel(rank, whole(rank.rank), optimizer=ADAM)
        checkpoints = parallel.Checkpoints(rank, tmp_path / "run")
        restored = await checkpoints.restore(model)
        if not restored:
            model = parallel.DataParallel(rank, whole(0), optimizer=ADAM)
        for step in range(model.steps, until):
            for name, gradient in whole(100 + step).items():
                model.reduce(name, gradient)
            model.step()
        await checkpoints.save(model)
        await checkpoints.finish()
        return restored and restored.exact, {name: value.tobytes() for name, value in (await model.finish()).items()}

    overlap.run(alone, 1, ranks=2, timeout_s=60)
    restored, _ = trained(2, tmp_path / "run", {"pp": 1, "dp": 1, "tp": 2}, "sharded", 2)
    assert [each.exact for each in restored] == [False, False]
    assert overlap.run(alone, 4, ranks=2, timeout_s=60) == [(False, through)] * 2


def test_a_whole_file_has_the_whole_model(tmp_path):
    _, expected = trained(4, tmp_path, {"pp": 2, "dp": 1, "tp": 2}, "sharded", 1, whole=True)
    saved = load_file(next(tmp_path.glob("checkpoint-*")) / "model.safetensors")
    assert {name: saved[name].tobytes() for name in expected} == expected
    assert saved["layer3.up.weight"].shape == (WIDTH, 2 * WIDTH)


def test_layers_tell_how_they_cut():
    async def main(rank):
        up = parallel.ColumnLinear(rank, rank.world, 4, 6)
        down = parallel.RowLinear(rank, rank.world, 6, 4)
        return up.cuts("a"), down.cuts("b")

    for index, (up, down) in enumerate(overlap.run(main, ranks=2)):
        assert up == {"weight": parallel.Cut("a.weight", 1, index, 2), "bias": parallel.Cut("a.bias", 0, index, 2)}
        assert down == {"weight": parallel.Cut("b.weight", 0, index, 2), "bias": parallel.Cut("b.bias")}


def two_weights(rank):
    return parallel.DataParallel(rank, {"a": np.ones(6), "b": np.ones(2)}, optimizer=parallel.SGD(0.1))


async def saves_two_weights(rank, folder):
    checkpoints = parallel.Checkpoints(rank, folder, cuts={name: parallel.Cut(name) for name in "ab"})
    await checkpoints.save(two_weights(rank))
    await checkpoints.finish()


def refused(tmp_path, cuts, ranks=2):
    """Return what restoring two weights by other cuts says on every rank."""

    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            await parallel.Checkpoints(rank, tmp_path, cuts=cuts(rank)).restore(two_weights(rank))
        return str(caught.value)

    [told] = set(overlap.run(main, ranks=ranks, timeout_s=60))
    return told


def test_what_does_not_fit_is_told_on_every_rank(tmp_path):
    a = parallel.Cut("a")
    overlap.run(saves_two_weights, tmp_path, ranks=2, timeout_s=60)
    of = f"model: {next(tmp_path.glob('checkpoint-*'))} is of another model:"
    assert refused(tmp_path, lambda rank: {"a": parallel.Cut("a", 0, rank.rank, 2)}) == (
        f"{of} 'a' is float64 (6,) there and float64 (12,) here; "
        "restore the model that was saved, or name another folder"
    )
    assert (
        refused(tmp_path, lambda rank: {"a": parallel.Cut("c")} if rank.rank else {})
        == f"{of} it has no 'c'; restore the model that was saved, or name another folder"
    )
    assert refused(tmp_path, lambda rank: {"c": a}) == "cuts: the model has no 'c'; it has a, b"
    assert (
        refused(tmp_path, lambda rank: {"a": parallel.Cut("a", 1, 0, 2)})
        == "cuts: expected an axis of 'a', whose shape is (6,), got 1"
    )
    assert refused(tmp_path, lambda rank: {"b": "b"}) == "cuts: expected parallel.Cut for 'b', got str"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("",), "Cut(name=...): expected the name of a weight, a non-empty string, got ''"),
        (("w", -1), "axis: expected a whole number from 0, got -1"),
        (("w", 0, 0, 0), "of: expected a whole number from 1, got 0"),
        (("w", 0, 2, 2), "index: expected less than the 2 blocks of 'w', got 2"),
    ],
)
def test_what_is_no_block_is_refused(arguments, told):
    assert str(error_of(overlap.UsageError, parallel.Cut, *arguments)) == told


def test_blocks_that_do_not_divide_are_told():
    assert str(error_of(overlap.UsageError, parallel.Cut("w", 0, 0, 4).block, np.zeros(6))) == (
        "cuts: axis 0 of 'w' has 6 elements, which 4 blocks cannot share equally; restore on a number of ranks that "
        "divides 6"
    )


# -- real layers -----------------------------------------------------------------------------------------------------


def passed_on(w, x):
    return x, None


def passed_back(w, kept, dy):
    return dy, {}


def square_loss(y, target):
    return 2 * (y - target) / y.size, float(((y - target) ** 2).mean())


async def pipeline(rank, folder, pp, tp, until):
    """Train four layers, in stages and cut over ranks; save, and return what was restored and the last loss."""
    mesh = rank.mesh(pp=pp, dp=1, tp=tp)
    schedule, each = parallel.schedules.make("1f1b", ranks=pp, microbatches=2), LAYERS // pp
    kinds = (parallel.ColumnLinear, parallel.RowLinear)
    layers = {f"m{i}": kinds[i % 2](rank, mesh["tp"], WIDTH, WIDTH) for i in range(each)}
    layers["end"] = parallel.Local(rank, passed_on, passed_back)
    params, cuts = {}, {}
    for stage in schedule.stages_of(mesh["pp"].rank):
        params[stage] = {"end": {}}
        for i in range(each):
            drawn = np.random.default_rng(each * stage + i).standard_normal((WIDTH, WIDTH)) / 4
            params[stage][f"m{i}"] = layers[f"m{i}"].shard({"weight": drawn, "bias": np.zeros(WIDTH)})
            told = layers[f"m{i}"].cuts(f"layer {each * stage + i}")
            cuts |= {f"{stage}.m{i}.{name}": cut for name, cut in told.items()}
    model = parallel.DataParallel(rank, params, optimizer=ADAM, group=mesh["dp"])
    stages = dict.fromkeys(params, parallel.Sequential(rank, layers))
    run = parallel.Pipeline(
        rank, schedule, stages, params, loss=square_loss, boundary=((4, WIDTH), np.float64), group=mesh["pp"],
        model=model,
    )  # fmt: skip
    checkpoints = parallel.Checkpoints(rank, folder, cuts=cuts)
    restored = await checkpoints.restore(model)
    x, target = np.random.default_rng(9).standard_normal((2, 2, 4, WIDTH))
    for _ in range(model.steps, until):
        passed = await run.run(list(x), list(target))
        model.step()
    loss = await passed.loss()
    await checkpoints.save(model)
    await checkpoints.finish()
    await model.finish()
    return restored and restored.step, loss


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 4), (2, 1)])
def test_stages_of_cut_layers_go_on_as_other_stages(tmp_path, pp, tp):
    [(_, expected), *_] = overlap.run(pipeline, tmp_path / "through", 2, 2, 6, ranks=4, timeout_s=60)
    overlap.run(pipeline, tmp_path / "run", 2, 2, 3, ranks=4, timeout_s=60)
    for step, loss in overlap.run(pipeline, tmp_path / "run", pp, tp, 6, ranks=pp * tp, timeout_s=60):
        assert step == 3
        assert loss == pytest.approx(expected, rel=1e-10)
