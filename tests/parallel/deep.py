"""A model of 32 layers on 64 ranks of a trn2, in virtual time: what hides behind compute there."""

from collections.abc import Sequence
from typing import Any

import overlap
from overlap import parallel
from overlap.timeline import Span, Timeline, breakdowns

LAYERS, RANKS, STEPS = 32, 64, 6
MB = 1_000_000
NAMES = [f"layer {i}" for i in range(LAYERS)]


def pass_on(_: object, x: Any) -> Any:
    return x


def back(_: object, x: Any, grad: Any) -> tuple[Any, Any]:
    return grad, x


async def train(rank: overlap.Rank, seconds: float, nbytes: int, waits: bool) -> list[Span]:
    """Train with a forward of so many seconds a layer, and a backward of twice as many; return all spans."""
    params = {name: rank.empty(nbytes // 2, "float16") for name in NAMES}
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1))
    for step in range(STEPS):
        x: Any = rank.empty(nbytes // 2, "float16")
        acts: dict[str, Any] = {}
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


def spans_of(seconds: float, nbytes: int, waits: bool = False) -> list[Span]:
    clock = overlap.Virtual(shapes_only=True, alike=1)  # all ranks do the same: the first runs for all
    return overlap.run(train, seconds, nbytes, waits, ranks=RANKS, cluster="trn2.48xlarge", clock=clock, timeout_s=60)[
        0
    ]


def steady(spans: Sequence[Span]) -> Any:
    """The figures of a step that has others before and behind it."""
    [row] = breakdowns(Timeline(spans=spans, world_size=RANKS, clock="virtual"), step=STEPS - 2)
    return row
