"""How much hides behind compute, in virtual time: of a model of 32 layers on 64 ranks of a trn2."""

import pytest

import overlap
from overlap import parallel
from overlap.timeline import Timeline, breakdowns

LAYERS, RANKS, STEPS = 32, 64, 6
MB = 1_000_000
NAMES = [f"layer {i}" for i in range(LAYERS)]


def pass_on(_, x):
    return x


def back(_, x, grad):
    return grad, x


async def train(rank, order, seconds, nbytes, waits):
    """Train with a forward of so many seconds a layer, and a backward of twice as many; return all spans."""
    params = {name: rank.empty(nbytes // 2, "float16") for name in NAMES}
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1), order=order)
    for step in range(STEPS):
        x, acts = rank.empty(nbytes // 2, "float16"), {}
        with rank.step(step):
            for name in NAMES:
                acts[name], x = x, rank.compute(pass_on, model[name], x, seconds=seconds, name=f"forward {name}")
            grad = rank.compute(pass_on, None, x, seconds=0, name="loss")
            for name in reversed(NAMES):
                both = rank.compute(back, model[name], acts[name], grad, seconds=2 * seconds, name=f"backward {name}")
                grad = both[0]
                model.reduce(name, both[1])
            done = model.step()
        if waits:
            await done
    await model.finish()
    return rank.recorder.spans()


def spans_of(order, seconds, nbytes, waits=False):
    clock = overlap.Virtual(shapes_only=True, alike=1)  # all ranks do the same: the first runs for all
    return overlap.run(
        train, order, seconds, nbytes, waits, ranks=RANKS, cluster="trn2.48xlarge", clock=clock, timeout_s=60
    )[0]


def steady(spans):
    """The figures of a step that has others before and behind it."""
    [row] = breakdowns(Timeline(spans=spans, world_size=RANKS, clock="virtual"), step=STEPS - 2)
    return row


@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "bounded"])
@pytest.mark.parametrize("order", ["forward", "fifo"])
@pytest.mark.parametrize(("seconds", "nbytes"), [(0.010, 400 * MB), (0.0005, 32 * MB)])
def test_where_computing_takes_longer_communication_is_hidden(order, waits, seconds, nbytes):
    row = steady(spans_of(order, seconds, nbytes, waits))
    assert row.compute_ns > row.comm_ns
    assert row.compute_ns >= 0.98 * row.wall_ns
    assert row.idle_ns == 0


def test_weights_that_forward_needs_first_overtake():
    """Where the wire is the limit, forward begins with the first weights instead of waiting for all."""
    forward, fifo = (spans_of(order, 0.0001, 400 * MB) for order in ("forward", "fifo"))
    assert steady(forward).comm_ns > steady(forward).compute_ns
    assert steady(forward).wall_ns < steady(fifo).wall_ns
    assert waits_for_last_bucket(fifo)
    assert not waits_for_last_bucket(forward)


def waits_for_last_bucket(spans):
    """Whether the second step's forward begins only when all gradients of the first step have been reduced."""
    begins_ns = min(span.start_ns for span in spans if span.name == f"forward {NAMES[0]}" and span.step == 1)
    ends_ns = max(span.end_ns for span in spans if span.name.startswith("bucket") and span.step == 0)
    return begins_ns >= ends_ns


def test_a_gradient_travels_while_the_layers_below_compute():
    spans = spans_of("forward", 0.010, 400 * MB)
    first = next(span for span in spans if span.name == "bucket 0" and span.step == 2)
    deepest, next_one = (
        next(span for span in spans if span.name == f"backward {NAMES[i]}" and span.step == 2) for i in (-1, -2)
    )
    assert deepest.end_ns <= first.start_ns < next_one.end_ns
