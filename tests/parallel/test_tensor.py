"""Tensor-parallel layers and the loss of cut scores: the numbers of one rank, and what does not divide."""

import numpy as np
import pytest
from trio.testing import assert_checkpoints

import overlap
from overlap import parallel
from overlap.parallel import ColumnLinear, Local, Replicated, RowLinear, Sequential, schedules
from tests.errors import error_of
from tests.parallel import blocks as b
from tests.runtime.companies import by_sockets, run_far
from tests.runtime.worlds import run
from tests.simulation.worlds import mesh, simulate, spans

# -- tensor-parallel layers: the numbers of one rank, collectives under compute, and what does not divide --------------

Array = np.ndarray
BLOCKS, STEPS = 2, 3


def layers_of(rank: overlap.Rank, group: overlap.Group, *, sequence: bool, tokens: int) -> dict[str, object]:
    """Two blocks: up, tanh, down, twice."""
    layers: dict[str, object] = {}
    for i in range(BLOCKS):
        layers[f"up{i}"] = ColumnLinear(rank, group, b.WIDTH, b.HIDDEN, sequence=sequence, tokens=tokens)
        layers[f"act{i}"] = b.act(rank)
        layers[f"down{i}"] = RowLinear(rank, group, b.HIDDEN, b.WIDTH, sequence=sequence, tokens=tokens)
    return layers


def whole_weights() -> dict[str, dict[str, Array]]:
    return {f"{name}{i}": w for i in range(BLOCKS) for name, w in b.block(10 * i).items()}


async def train(rank: overlap.Rank, sequence: bool, parts: int) -> dict[str, dict[str, Array]]:
    """Train with the matrices cut over all ranks; return this rank's parts of them."""
    layers = layers_of(rank, rank.world, sequence=sequence, tokens=b.ROWS)
    model = Sequential(rank, layers, parts=parts, axis=int(sequence))
    w = {name: layers[name].shard(each) if each else {} for name, each in whole_weights().items()}
    for step in range(STEPS):
        x, target = b.batch(step)
        if sequence:
            x, target = (each.reshape(8, 2, b.WIDTH) for each in (x, target))
            mine = np.array_split(np.arange(8), rank.world_size)[rank.rank]
            x, target = x[mine], target[mine]
        y, kept = await model.forward(w, x)
        dy = rank.compute(lambda y, t: 2 * (y - t) / (b.ROWS * b.WIDTH), y, target, seconds=0.0)
        _, dw = model.backward(w, kept, dy)
        w = await rank.compute(b.descend, w, dw, seconds=0.0)
    return w


def one_rank_parts(rank: int, ranks: int) -> dict[str, dict[str, Array]]:
    """What one rank learns alone, cut as the matrices are."""
    weights, _ = b.one_rank(BLOCKS, STEPS)
    cut: dict[str, dict[str, Array]] = {}
    for i, block in enumerate(weights):
        up, down = block["up"], block["down"]
        cut[f"up{i}"] = {name: np.split(each, ranks, -1)[rank] for name, each in up.items()}
        cut[f"act{i}"] = {}
        cut[f"down{i}"] = {"weight": np.split(down["weight"], ranks)[rank], "bias": down["bias"]}
    return cut


@pytest.mark.parametrize("sequence", [False, True], ids=["whole rows", "sequence"])
@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 2), (4, 1), (4, 2)])
def test_ranks_with_parts_of_the_matrices_learn_what_one_learns(
    clock: str, ranks: int, parts: int, sequence: bool
) -> None:
    if clock == "real":
        found = run(train, ranks, sequence, parts)
    else:
        found, _ = simulate(train, ranks, sequence, parts)
    assert [b.close(w, one_rank_parts(rank, ranks)) for rank, w in enumerate(found)] == [True] * ranks


def test_three_parts_give_what_one_does() -> None:
    """Also where they do not divide: 16 rows."""

    async def main(rank: overlap.Rank) -> bool:
        layers = layers_of(rank, rank.world, sequence=False, tokens=b.ROWS)
        w = {name: layers[name].shard(each) if each else {} for name, each in whole_weights().items()}
        found = []
        for parts in (1, 3):
            model = Sequential(rank, layers, parts=parts)
            x, dy = b.batch(0)
            y, kept = await model.forward(w, x)
            dx, dw = model.backward(w, kept, dy)
            found.append([await y, await dx, *[dict(await each) for each in dw.values()]])
        return b.close(*found)

    assert run(main, 2) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["whole rows", "sequence"])
def test_over_efa(sequence: bool) -> None:
    found = run_far(train, 2, 2, sequence, 2, wires=by_sockets)
    assert [b.close(w, one_rank_parts(rank, 4)) for rank, w in enumerate(found)] == [True] * 4


# -- what travels under what ---------------------------------------------------------------------------------------


async def forward_and_back(rank: overlap.Rank, parts: int) -> list[int]:
    """Two 64 x 64 matrices over two ranks, 20 rows: a product takes 20 * 2 * 64 * 64 / 2 / 1e9 s = 81.92 us."""
    tokens = 20 // parts
    layers = {
        "up": ColumnLinear(rank, rank.world, 64, 64, tokens=tokens),
        "down": RowLinear(rank, rank.world, 64, 64, tokens=tokens),
    }
    w = {name: {"weight": np.ones((64, 32) if name == "up" else (32, 64), np.float32)} for name in layers}
    model = Sequential(rank, layers, parts=parts)
    y, kept = await model.forward(w, np.ones((20, 64), np.float32))
    await y
    forward_ns = rank.now_ns()
    dx, _ = model.backward(w, kept, np.ones((20, 64), np.float32))
    await dx
    return [forward_ns, rank.now_ns() - forward_ns]


def test_one_parts_collective_travels_under_the_others_compute() -> None:
    """20 rows of 64 float32 are 5120 bytes; between two ranks an all-reduce of them takes 5120 bytes' time."""
    wire = mesh(2, bytes_per_s=5120 / 40e-6)  # 40 us, or 20 us for half of them
    product = 81_920
    (whole, _), _ = simulate(forward_and_back, 2, 1, cluster=wire)[0]
    assert whole == 2 * product + 40_000
    timed, timeline = simulate(forward_and_back, 2, 2, cluster=wire)
    assert timed[0][0] == 2 * product + 20_000
    computes = [each for each in spans(timeline, 0, "compute") if each[0] == "row product"]
    sums = [each for each in spans(timeline, 0) if each[0] == "sum y"]
    assert [each[2] - each[1] for each in sums] == [20_000] * 2
    assert computes[1][1] <= sums[0][1] < sums[0][2] <= computes[1][2]


def test_the_gradient_of_the_input_travels_under_that_of_the_weights() -> None:
    """Row: two products. Column: a product, whose 40 us on the wire end before the weights' gradient does."""
    timed, timeline = simulate(forward_and_back, 2, 1, cluster=mesh(2, bytes_per_s=5120 / 40e-6))
    assert timed[0][1] == 3 * 81_920 + 40_000
    (travels,) = [each for each in spans(timeline, 0) if each[0] == "sum dx"]
    last = spans(timeline, 0, "compute")[-1]
    assert last[1] <= travels[1] < travels[2] < last[2]


# -- shared weights, and layers by themselves ------------------------------------------------------------------------


def test_gradients_of_shared_weights_are_summed() -> None:
    async def main(rank: overlap.Rank) -> tuple[object, object]:
        gain = Local(
            rank, lambda w, x: (x * w["gain"], x), lambda w, x, dy: (dy * w["gain"], {"gain": (dy * x).sum(0)})
        )
        layer = Replicated(gain, rank.world)
        w, x = {"gain": np.array([2.0, 3.0])}, np.full((2, 2), rank.rank + 1.0)
        _, kept = layer.forward(w, x)
        dx, dw = layer.backward(w, kept, np.ones((2, 2)))
        return (await dx).tolist(), (await dw["gain"]).tolist()

    assert run(main, 2) == [([[2.0, 3.0]] * 2, [6.0, 6.0])] * 2


def test_a_backward_in_halves_is_a_backward() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        halves = Local(rank, b.block_forward, backward_input=b.block_input, backward_weights=b.block_weights)
        whole = Local(rank, b.block_forward, b.block_backward)
        w, (x, dy) = b.block(0), b.batch(0)
        found = []
        for layer in (halves, whole):
            _, kept = layer.forward(w, x)
            dx, dw = layer.backward(w, kept, dy)
            found.append((await dx, await dw))
        return [b.close(*found, within=0), halves.splits, whole.splits]

    assert run(main, 1) == [[True, True, False]]


def test_without_data_nothing_is_computed() -> None:
    async def main(rank: overlap.Rank) -> list[tuple[int, ...]]:
        layers = {
            "up": ColumnLinear(rank, rank.world, 1 << 16, 1 << 18, sequence=True, tokens=1 << 16),
            "down": RowLinear(rank, rank.world, 1 << 18, 1 << 16, sequence=True, tokens=1 << 16),
        }
        model = Sequential(rank, layers, parts=2, axis=1)
        w = {"up": {"weight": rank.empty((1 << 16, 1 << 17))}, "down": {"weight": rank.empty((1 << 17, 1 << 16))}}
        x = rank.empty((1 << 13, 8, 1 << 16))
        y, kept = await model.forward(w, x)
        dx, dw = model.backward(w, kept, y)
        return [(await dx).shape, (await dw["up"])["weight"].shape]

    assert simulate(main, 2, shapes_only=True)[0] == [[(1 << 13, 8, 1 << 16), (1 << 16, 1 << 17)]] * 2


# -- bad input -------------------------------------------------------------------------------------------------------


def test_forward_is_a_checkpoint_of_layers_that_only_compute_too() -> None:
    async def main(rank: overlap.Rank) -> None:
        with assert_checkpoints():
            await Sequential(rank, {"act": b.act(rank)}).forward({"act": {}}, np.ones((2, 2)))

    run(main, 1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda rank: ColumnLinear(rank, rank.world, 6, 7),
            "outputs: 7 do not divide by the 2 ranks of group 'world'; choose a multiple of 2",
        ),
        (
            lambda rank: RowLinear(rank, rank.mesh(tp=2)["tp"], 9, 4),
            "inputs: 9 do not divide by the 2 ranks of group 'tp'; choose a multiple of 2",
        ),
        (
            lambda rank: ColumnLinear(rank, rank.world, 6, 8).shard({"weight": np.ones((8, 6))}),
            "whole: expected weight (6, 8) and bias (8,), got weight (8, 6)",
        ),
        (
            lambda rank: ColumnLinear(rank, rank.world, 6, 8).shard({"gain": np.ones(8)}),
            "whole: expected weight (6, 8) and bias (8,), got gain (8,)",
        ),
        (lambda rank: Sequential(rank, {}), "layers: there are none; pass one or more"),
        (lambda rank: Sequential(rank, {"a": b.act(rank)}, parts=0), "parts: expected a whole number from 1, got 0"),
        (lambda rank: Local(rank, b.tanh), "backward: give it, or its halves backward_input and backward_weights"),
        (
            lambda rank: Local(rank, b.tanh, b.tanh_backward, backward_input=b.block_input),
            "backward_input, backward_weights: one is the half of the other; give both, or none",
        ),
        (
            lambda rank: rank.mesh(pp=2, tp=3),
            "axes: pp=2 x tp=3 makes 6 ranks, but the world has 2; choose sizes whose product is 2",
        ),
    ],
)
def test_what_cannot_be_meant_is_told_on_every_rank(make, told: str) -> None:
    async def main(rank: overlap.Rank) -> str:
        return str(error_of(overlap.UsageError, make, rank))

    assert run(main, 2) == [told] * 2


# ----------------------------------------------------------------------------------------------------------------------
# The loss of scores that are cut by words: the numbers of one rank, whatever their size, and what cannot be meant

WORDS = 12
NUMBERS = np.random.default_rng(5)
TARGET = NUMBERS.integers(0, WORDS, (3, 4))
SCORES = NUMBERS.standard_normal((3, 4, WORDS)) + NUMBERS.choice([0.0, 1000.0, -1000.0], (3, 4, 1))


def alone() -> tuple[np.ndarray, float]:
    """The gradient of all scores, and the loss, by one rank."""
    p = np.exp(SCORES - SCORES.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    came = (*np.indices(TARGET.shape), TARGET)
    loss = -float(np.log(p[came]).mean())
    p[came] -= 1
    return p / TARGET.size, loss


async def cut(rank: overlap.Rank) -> tuple[np.ndarray, float]:
    loss = parallel.VocabularyLoss(rank, rank.world, WORDS)
    mine = np.split(SCORES, rank.world_size, -1)[rank.rank]
    both = loss.issue(rank.compute(mine.copy, seconds=0.0), TARGET)
    return await both[0], await both[1]  # type: ignore[return-value]


def check(found: list[tuple[np.ndarray, float]]) -> None:
    gradient, loss = alone()
    np.testing.assert_allclose(np.concatenate([each for each, _ in found], -1), gradient, rtol=1e-10, atol=1e-15)
    assert len({each for _, each in found}) == 1
    assert found[0][1] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_that_of_one_rank(ranks: int) -> None:
    check(run(cut, ranks))


def test_in_virtual_time() -> None:
    check(simulate(cut, 4)[0])


@pytest.mark.slow
def test_the_loss_over_efa() -> None:
    check(run_far(cut, 2, 2, wires=by_sockets))


def test_a_pipeline_takes_it() -> None:
    """Two microbatches: the gradient is that of the whole batch."""

    async def main(rank: overlap.Rank) -> tuple[np.ndarray, float]:
        words = rank.group([0, 1])
        head = parallel.ColumnLinear(rank, words, WORDS, WORDS)
        weights = {"weight": np.split(np.eye(WORDS), 2, -1)[rank.rank]}
        schedule = schedules.make("gpipe", ranks=1, microbatches=3)
        loss = parallel.VocabularyLoss(rank, words, WORDS)
        pipeline = parallel.Pipeline(
            rank, schedule, {0: head}, {0: weights}, loss=loss, boundary=((1,), np.float64),
            group=rank.group([rank.rank]),
        )  # fmt: skip
        passed = await pipeline.run(SCORES, TARGET)
        return (await passed.gradients[0])["weight"], await passed.loss()  # type: ignore[misc]

    found = run(main, 2)
    gradient, loss = alone()
    expected = np.einsum("abi,abj->ij", SCORES, gradient)
    np.testing.assert_allclose(np.concatenate([each for each, _ in found], -1), expected, rtol=1e-10, atol=1e-10)
    assert [each for _, each in found] == [pytest.approx(loss, rel=1e-12)] * 2


def test_without_data_no_loss_is_computed() -> None:
    async def main(rank: overlap.Rank) -> tuple[int, ...]:
        loss = parallel.VocabularyLoss(rank, rank.world, 1 << 20, tokens=1 << 20)
        both = loss.issue(rank.empty((1 << 20, 1 << 19)), rank.empty(1 << 20, np.int64))
        return (await both[0]).shape  # type: ignore[attr-defined, no-any-return]

    assert overlap.run(main, ranks=2, clock=overlap.Virtual(shapes_only=True)) == [(1 << 20, 1 << 19)] * 2


def test_words_that_do_not_divide_are_told_on_every_rank() -> None:
    async def main(rank: overlap.Rank) -> str:
        return str(error_of(overlap.UsageError, parallel.VocabularyLoss, rank, rank.world, 7))

    assert run(main, 2) == ["words: 7 do not divide by the 2 ranks of group 'world'; choose a multiple of 2"] * 2


@pytest.mark.parametrize(
    ("shape", "target", "told"),
    [
        ((2, 6), np.array([0, 12]), "target: expected 0 to 11, got 12"),
        ((2, 6), np.array([-1, 0]), "target: expected 0 to 11, got -1"),
        ((2, 5), np.array([0, 1]), "loss: for targets of shape (2,), expected scores of shape (2, 6), got (2, 5)"),
        ((2, 6), np.array([0]), "loss: for targets of shape (1,), expected scores of shape (1, 6), got (2, 6)"),
    ],
)
def test_targets_that_cannot_be_meant_are_told_on_every_rank(
    shape: tuple[int, ...], target: np.ndarray, told: str
) -> None:
    async def main(rank: overlap.Rank) -> str:
        with pytest.raises(overlap.UsageError) as caught:
            await parallel.VocabularyLoss(rank, rank.world, WORDS).issue(np.zeros(shape), target)
        return str(caught.value)

    assert run(main, 2) == [told] * 2
