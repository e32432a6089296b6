"""Pipelines: the numbers of one rank under every schedule, its bubbles in virtual time, its memory, and bad input."""

import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import Local, Pipeline, schedules
from overlap.parallel.schedules import FAMILIES, ActionKind, Durations, PipelineSchedule
from tests.errors import error_of
from tests.parallel import blocks as b
from tests.runtime.companies import by_sockets, run_far
from tests.runtime.worlds import TIMEOUT_S, failure_of, run
from tests.simulation.worlds import mesh, simulate, spans

Array = np.ndarray
STEPS = 3
MS = 1_000_000


def block_layer(rank: overlap.Rank, durations: Durations | None = None) -> Local:
    """A block as plain functions, whole and in halves; durations are milliseconds of virtual time."""
    durations = durations or Durations()
    costs = {
        "forward": durations.of(ActionKind.FORWARD),
        "backward": durations.of(ActionKind.BACKWARD),
        "backward_input": durations.of(ActionKind.INPUT_GRADIENT),
        "backward_weights": durations.of(ActionKind.WEIGHT_GRADIENT),
    }
    return Local(
        rank,
        b.block_forward,
        b.block_backward,
        backward_input=b.block_input,
        backward_weights=b.block_weights,
        costs={name: {"seconds": cost / 1e3} for name, cost in costs.items()},
    )


def build(rank: overlap.Rank, schedule: PipelineSchedule, **options) -> Pipeline:
    mine = schedule.stages_of(rank.rank)
    given = {
        "layers": {stage: block_layer(rank) for stage in mine},
        "params": {stage: b.block(10 * stage) for stage in mine},
        "loss": b.square_loss,
        "loss_cost": {"seconds": 0},
        "boundary": ((b.ROWS // schedule.microbatches, b.WIDTH), np.float64),
    }
    return Pipeline(rank, schedule, **(given | options))


async def train(rank: overlap.Rank, schedule: PipelineSchedule) -> tuple[list[float], dict[int, object]]:
    """Train by hand: gradients come back, weights are put in."""
    pipeline, losses = build(rank, schedule), []
    for step in range(STEPS):
        passed = await pipeline.run(*b.batch(step))
        losses.append(await passed.loss())
        for stage, gradients in passed.gradients.items():
            descended = rank.compute(b.descend, pipeline.params[stage], gradients, seconds=0)
            pipeline.params[stage] = await descended
    return losses, pipeline.params


def test_messages_from_stage_to_stage_have_that_role(clock: str) -> None:
    async def main(rank: overlap.Rank) -> set[tuple[str, str]]:
        pipeline = build(rank, schedules.one_f_one_b(2, 2))
        await rank.all_reduce(np.zeros(1), name="0F2 to 1")
        passed = await pipeline.run(*b.batch(0))
        await passed.loss()
        await rank.compute(lambda _: None, list(passed.gradients.values()), seconds=0)
        return {(span.name, span.role) for span in rank.recorder.spans() if span.kind == "comm"}

    found = set().union(*overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S))
    assert {name for name, role in found if role == "stage"} == {"0F0 to 1", "0F1 to 1", "1B0 to 0", "1B1 to 0"}
    assert {name for name, role in found if role == "program"} == {"0F2 to 1", "loss"}


async def train_model(rank: overlap.Rank, schedule: PipelineSchedule) -> tuple[list[float], dict[int, object]]:
    """Train with a model that keeps the weights and updates them; nothing waits but for the losses, at the end."""
    params = {stage: b.block(10 * stage) for stage in schedule.stages_of(rank.rank)}
    alone = rank.group([rank.rank])
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(b.LR), group=alone)
    pipeline, passed = build(rank, schedule, params=params, model=model), []
    for step in range(STEPS):
        with rank.step(step):
            passed.append(await pipeline.run(*b.batch(step)))
            model.step()
    return [await each.loss() for each in passed], await model.finish()


def learnt_alone(found: list[tuple[list[float], dict[int, object]]], stages: int) -> bool:
    """Whether all stages have the weights, and all ranks saw the losses, of one rank that learns alone."""
    weights, losses = b.one_rank(stages, STEPS)
    have = {int(stage): w for _, mine in found for stage, w in mine.items()}
    return b.close([have[stage] for stage in range(stages)], weights) and all(
        b.close(seen, losses) for seen, _ in found
    )


SCHEDULES = {
    "gpipe": schedules.gpipe(2, 4),
    "1f1b": schedules.one_f_one_b(4, 8),
    "1f1b, few microbatches": schedules.one_f_one_b(4, 2),
    "interleaved-1f1b": schedules.interleaved_1f1b(2, 4, 3),
    "zb-h1": schedules.zb_h1(4, 8),
    "zb-h2": schedules.make("zb-h2", ranks=4, microbatches=8),
    "zb-v": schedules.make("zb-v", ranks=2, microbatches=4),
    "dualpipe-v": schedules.make("dualpipe-v", ranks=2, microbatches=4),
    "one rank": schedules.zb_h1(1, 2),
    "one microbatch": schedules.gpipe(2, 1),
    "both ways": PipelineSchedule.parse("0F1,0F0,3F1,3F0,3B0,3B1,0B1,0B0\n1F0,1F1,2F1,2F0,2B1,2B0,1B0,1B1"),
}


@pytest.mark.everyday(12)
@pytest.mark.parametrize("program", [train, train_model], ids=["gradients", "model"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("clock", ["real", "virtual", pytest.param("sockets", marks=pytest.mark.slow)])
def test_stages_learn_what_one_rank_learns(clock, name, program) -> None:
    schedule = SCHEDULES[name]
    if clock == "sockets" and schedule.ranks > 1:
        found = run_far(program, 2, schedule.ranks // 2, schedule, wires=by_sockets)
    elif clock == "virtual":
        found, _ = simulate(program, schedule.ranks, schedule)
    else:
        found = run(program, schedule.ranks, schedule)
    assert learnt_alone(found, schedule.stages)


# -- in virtual time ---------------------------------------------------------------------------------------------------


async def one_batch(rank: overlap.Rank, schedule: PipelineSchedule, durations: Durations) -> int:
    layers = {stage: block_layer(rank, durations) for stage in schedule.stages_of(rank.rank)}
    passed = await build(rank, schedule, layers=layers).run(*b.batch(0))
    for gradients in passed.gradients.values():
        await gradients
    return rank.now_ns()


def begun(timeline, rank: int) -> list[float]:
    """When the actions of a rank began, in milliseconds."""
    names = {"block_forward", "block_backward", "block_input", "block_weights"}
    return [start / MS for name, start, _ in spans(timeline, rank, "compute") if name in names]


def on_paper(schedule: PipelineSchedule, durations: Durations) -> list[list[float]]:
    starts = schedule.timing(durations).starts
    return [[starts[action] for action in row] for row in schedule.rows]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("durations", [Durations(), Durations(forward=2, input_gradient=3, weight_gradient=1)])
def test_the_measured_bubble_is_that_of_the_formula(name: str, durations: Durations) -> None:
    schedule = schedules.make(name, ranks=4, microbatches=8)
    ended, timeline = simulate(one_batch, 4, schedule, durations, cluster=mesh(4, bytes_per_s=1e30))
    microbatch = durations.of(ActionKind.FORWARD) + durations.of(ActionKind.BACKWARD)
    busy = 8 * microbatch * schedule.stages // 4
    formula = FAMILIES[name].bubble(4, 8, durations)
    assert formula in (None, max(ended) / MS - busy)
    assert formula is not None or durations != Durations()  # some are known for equal durations only
    assert [begun(timeline, rank) for rank in range(4)] == on_paper(schedule, durations)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_travels_is_received_under_compute(name: str) -> None:
    """Messages take half of a forward: every action begins when a schedule on paper with such hops says."""
    schedule, durations = (
        schedules.make(name, ranks=4, microbatches=8),
        Durations(forward=2, input_gradient=3, weight_gradient=2, hop=1),
    )
    nbytes = b.ROWS // 8 * b.WIDTH * 8
    _, timeline = simulate(one_batch, 4, schedule, durations, cluster=mesh(4, bytes_per_s=nbytes / 1e-3))
    assert [begun(timeline, rank) for rank in range(4)] == on_paper(schedule, durations)


def test_what_comes_next_is_issued_while_an_action_computes() -> None:
    """A forward that ends when the one after it has been issued."""

    async def main(rank: overlap.Rank) -> None:
        followed = threading.Event()
        inner = Local(rank, lambda w, x: (followed.wait(60) and x, None), lambda w, kept, dy: (dy, {}))

        class Layer:
            issued = 0

            def forward(self, w, x):
                self.issued += 1
                if self.issued == 2:
                    followed.set()
                return inner.forward(w, x)

            backward = inner.backward

        await build(rank, schedules.gpipe(1, 2), layers={0: Layer()}, params={0: {}}, ahead=1).run(*b.batch(0))
        assert followed.is_set()

    run(main, 1)


class Kept:
    """What a forward keeps, so that one can see for how long."""

    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize("name", FAMILIES)
def test_no_more_is_held_than_the_schedule_says(name: str) -> None:
    schedule = schedules.make(name, ranks=4, microbatches=8)

    async def main(rank: overlap.Rank) -> int:
        alive: list[weakref.ref[Kept]] = []
        most = 0

        def forward(w, x):
            nonlocal most
            y, kept = b.block_forward(w, x)
            kept = Kept(kept)
            alive.append(weakref.ref(kept))
            most = max(most, sum(each() is not None for each in alive))
            return y, kept

        costs = {name: {"seconds": 1e-3} for name in ("forward", "backward", "backward_input", "backward_weights")}
        halves = {"backward_input": holding(b.block_input), "backward_weights": released}
        layer = Local(rank, forward, whole, **halves, costs=costs)
        pipeline = build(rank, schedule, layers=dict.fromkeys(schedule.stages_of(rank.rank), layer))
        await pipeline.run(*b.batch(0))
        return most

    held, _ = simulate(main, 4)
    assert tuple(held) == schedule.peak_live


def whole(w, kept, dy):
    return b.block_backward(w, kept.value, dy)


def holding(backward):
    """Keep what forward has kept until the weights' turn."""

    def function(w, kept, dy):
        dx, needed = backward(w, kept.value, dy)
        return dx, (kept, needed)

    return function


def released(w, kept):
    return b.block_weights(w, kept[1])


def test_gradients_are_handed_over_with_the_last_backward_of_their_stage() -> None:
    """Of two stages on a rank, those of the second while the first still computes."""
    schedule = PipelineSchedule.parse("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1")

    class Keeper:
        def __init__(self) -> None:
            self.weights = parallel.flatten({stage: b.block(10 * stage) for stage in (0, 1)})
            self.order: list[str] = []

        def __getitem__(self, name: str) -> Array:
            self.order.append(f"get {name}")
            return self.weights[name]

        def reduce(self, name: str, grad: object) -> None:
            self.order.append(name)

    async def main(rank: overlap.Rank) -> list[str]:
        keeper = Keeper()
        layers = dict.fromkeys((0, 1), traced(rank, keeper.order))
        await build(rank, schedule, layers=layers, model=keeper).run(*b.batch(0))
        return keeper.order

    (order,) = run(main, 1)
    names = list(Keeper().weights)
    gets = [f"get {name}" for name in names]
    forwards, backwards = ["forward"] * 2, ["backward"] * 2
    assert order == [*gets[:4], *forwards, *gets[4:], *forwards, *backwards, *names[4:], *backwards, *names[:4]]


def traced(rank: overlap.Rank, order: list[str]) -> object:
    """A layer that notes when it is issued."""
    inner = block_layer(rank)

    class Traced:
        def forward(self, w, x):
            order.append("forward")
            return inner.forward(w, x)

        def backward(self, w, kept, dy):
            order.append("backward")
            return inner.backward(w, kept, dy)

    return Traced()


def test_a_batch_may_come_in_microbatches_and_boundaries_may_differ() -> None:
    """Three stages of widths 6, 8, 6; rows that differ between microbatches would need boundaries that do."""
    schedule = schedules.gpipe(3, 2)
    linear = (b.linear, lambda w, x, dy: (b.linear_input(w, x, dy)[0], b.linear_weights(w, (x, dy))))

    async def main(rank: overlap.Rank) -> tuple[float, object]:
        w = [
            {"weight": b.draw(i, *shape), "bias": b.draw(9, shape[1])}
            for i, shape in enumerate([(6, 8), (8, 8), (8, 6)])
        ]
        x, target = b.batch(0)
        pipeline = build(
            rank, schedule, layers={rank.rank: Local(rank, *linear)}, params={rank.rank: w[rank.rank]},
            boundary=[((8, 8), np.float64), ((8, 8), np.float64)],
        )  # fmt: skip
        passed = await pipeline.run([x[:8], x[8:]], [target[:8], target[8:]])
        y = x
        for each in w:
            y = b.linear(each, y)[0]
        gradient = b.square_loss(y, target)[0].sum(0)
        return await passed.loss() - b.square_loss(y, target)[1], (await passed.gradients[rank.rank])["bias"], gradient

    found = run(main, 3)
    assert all(abs(loss) < 1e-12 for loss, _, _ in found)
    assert b.close(found[2][1], found[2][2])


# -- bad input -------------------------------------------------------------------------------------------------------

TWO = schedules.one_f_one_b(2, 4)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            lambda rank: build(rank, schedules.gpipe(4, 4), layers={}, params={}),
            "schedule: gpipe is for 4 ranks, group 'world' has 2; make one for 2",
        ),
        (
            lambda rank: build(rank, TWO, layers={rank.rank + 1: block_layer(rank)}),
            "layers: expected the stages 0 of rank 0 of group 'world', got 1",
        ),
        (
            lambda rank: build(rank, TWO, params={}),
            "params: expected the stages 0 of rank 0 of group 'world', got none",
        ),
        (
            lambda rank: build(
                rank, schedules.zb_h1(2, 2), layers={rank.rank: Local(rank, b.block_forward, b.block_backward)}
            ),
            "layers: the backward of stage 0 is one piece; schedule zb-h1 needs backward_input and backward_weights",
        ),
        (
            lambda rank: build(rank, TWO, boundary=[((4, 6), float)] * 2),
            "boundary: expected 1 for 2 stages, got 2",
        ),
        (lambda rank: build(rank, TWO, ahead=-1), "ahead: expected a whole number from 0, got -1"),
    ],
)
def test_what_cannot_be_meant_is_told(wrong: Callable[[overlap.Rank], object], told: str) -> None:
    async def main(rank: overlap.Rank) -> str:
        return str(error_of(overlap.UsageError, wrong, rank))

    assert run(main, 2)[0] == told


@pytest.mark.parametrize(
    ("batch", "rank", "told"),
    [
        ((None, b.draw(0, 8, 6)), 0, "x: rank 0 of group 'world' has the first stage; got None; pass the batch there"),
        (
            (b.draw(0, 8, 6), None),
            1,
            "target: rank 1 of group 'world' has the last stage; got None; pass the batch there",
        ),
        (
            (b.draw(0, 6, 6), b.draw(0, 8, 6)),
            0,
            "x: the first dimension of shape (6, 6) is no multiple of 4 microbatches; pad it to 8, or choose a number "
            "of them that divides it",
        ),
        (([b.draw(0, 8, 6)], b.draw(0, 8, 6)), 0, "x: expected 4 microbatches, those of schedule 1f1b, got 1"),
    ],
)
def test_a_batch_that_cannot_be_meant_is_told(batch: tuple[object, object], rank: int, told: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        await build(rank, TWO).run(*batch)

    failure = failure_of(run, main, 2)
    assert (failure.rank, str(failure.cause)) == (rank, told)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_trees_pass_between_stages(name: str) -> None:
    """Values and their gates pass from stage to stage, and their gradients back from the loss."""

    def forward(w: Array, both: dict[str, Array]) -> tuple[dict[str, Array], object]:
        return {"x": both["x"] @ w, "gate": both["gate"] * 2}, both["x"]

    def backward_input(w: Array, x: Array, dy: dict[str, Array]) -> tuple[dict[str, Array], object]:
        return {"x": dy["x"] @ w.T, "gate": dy["gate"] * 2}, (x, dy["x"])

    def backward_weights(w: Array, kept: tuple[Array, Array]) -> Array:
        return kept[0].T @ kept[1]

    def loss(y: dict[str, Array], target: Array) -> tuple[dict[str, Array], float]:
        left = y["x"] * y["gate"] - target
        return {"x": 2 * left * y["gate"] / left.size, "gate": 2 * left * y["x"] / left.size}, float((left**2).mean())

    schedule = schedules.make(name, ranks=2, microbatches=4)
    weights = [b.draw(stage, b.WIDTH, b.WIDTH) for stage in range(2)]
    x, target = b.batch(0)
    microbatches = [{"x": part, "gate": part + 1} for part in np.split(x, 4)]

    async def main(rank: overlap.Rank) -> tuple[float, Array]:
        layer = Local(rank, forward, backward_input=backward_input, backward_weights=backward_weights)
        shape = (b.ROWS // 4, b.WIDTH)
        pipeline = build(
            rank, schedule, layers={rank.rank: layer}, params={rank.rank: weights[rank.rank]}, loss=loss,
            boundary={"x": (shape, np.float64), "gate": (shape, float)},
        )  # fmt: skip
        passed = await pipeline.run(microbatches, target)
        gradients = passed.gradients[rank.rank]
        return await passed.loss(), await gradients if isinstance(gradients, overlap.Future) else gradients

    (one, first), (two, second) = run(main, 2)
    y = {"x": x @ weights[0] @ weights[1], "gate": (x + 1) * 4}
    dy, expected = loss(y, target)
    assert one == two == pytest.approx(expected)
    assert np.allclose(second, (x @ weights[0]).T @ dy["x"])
    assert np.allclose(first, x.T @ (dy["x"] @ weights[1].T))


def test_another_shape_than_the_boundary_says_is_told_with_both() -> None:
    async def main(rank: overlap.Rank) -> None:
        await (await build(rank, TWO, boundary=((4, 7), np.float64)).run(*b.batch(0))).loss()

    failure = failure_of(run, main, 2)
    assert isinstance(failure.cause, overlap.UsageError)
    assert "float64 (4, 6)" in str(failure)
    assert "float64 (4, 7)" in str(failure)


def test_an_error_in_a_stage_ends_the_run_with_its_rank() -> None:
    async def main(rank: overlap.Rank) -> None:
        pipeline = build(rank, TWO, params={rank.rank: b.block(0, width=6 + rank.rank)})
        await pipeline.run(*b.batch(0))

    failure = failure_of(run, main, 2)
    assert failure.rank == 1
    assert isinstance(failure.cause, ValueError)


def test_a_pipeline_of_models_that_fit_no_memory() -> None:
    """Without data, nothing is computed or added, and the times are those of the schedule."""
    schedule = schedules.zb_h1(4, 8)
    shape = (1 << 16, 1 << 16)

    async def main(rank: overlap.Rank) -> int:
        def passed(w, *_):
            return rank.empty(shape), None

        def weights(w, kept):
            return {"w": rank.empty(shape)}

        costs = {name: {"seconds": 1e-3} for name in ("forward", "backward_input", "backward_weights")}
        layer = Local(rank, passed, backward_input=passed, backward_weights=weights, costs=costs)
        pipeline = build(
            rank, schedule, layers={rank.rank: layer}, params={rank.rank: {"w": rank.empty(shape)}},
            loss=lambda y, target: (y, 0.0), boundary=(shape, np.float32),
        )  # fmt: skip
        batch = [rank.empty(shape)] * 8
        await (await pipeline.run(batch, batch)).gradients[rank.rank]
        return rank.now_ns() // MS

    assert max(simulate(main, 4, cluster=mesh(4, bytes_per_s=1e30), shapes_only=True)[0]) == 27
