"""The loops that make results: what each keeps alive, and that they are compared in turn and checked."""

import weakref

import numpy as np
import pytest

from overlap.cli.bench.sampling import Sampling
from tests.benchmarks import results


class Counting:
    """A rank that makes results, and counts those that are still alive at each operation."""

    def __init__(self):
        self.made, self.alive, self.outs = [], [], []

    async def all_reduce(self, x, out=None):
        self.alive.append(sum(ref() is not None for ref in self.made))
        self.outs.append(out)
        made = x.copy() if out is None else out
        self.made.append(weakref.ref(made))
        return made


@pytest.mark.parametrize(("kind", "alive"), [("dropped", [0] * 5), ("kept", [0, 1, 2, 2, 2])])
def test_how_many_results_a_loop_keeps(kind, alive):
    counting = Counting()
    steps = results.KINDS[kind](counting, np.ones(2), np.zeros(2), 5)
    with pytest.raises(StopIteration):  # nothing in it waits
        steps.send(None)
    assert counting.alive == alive
    assert counting.outs == [None] * 5


def test_given_results_are_all_one_array():
    counting, out = Counting(), np.zeros(2)
    with pytest.raises(StopIteration):
        results.KINDS["given"](counting, np.ones(2), out, 3).send(None)
    assert [one is out for one in counting.outs] == [True] * 3


@pytest.mark.parametrize(("total", "wrong"), [(3, 0), (4, 2 * 2 * (1 << 15))])
def test_every_size_is_compared_and_checked(monkeypatch, total, wrong):
    monkeypatch.setattr(results, "SIZES_BYTES", (128 << 10,))
    monkeypatch.setattr(results, "TOTAL", total)
    given, *made = results.figures(Sampling(iters=2, warmup=1))
    assert (given.name, given.text, given.aim) == ("results/131072", "all_reduce, 128 KiB, 2 ranks, out=", None)
    assert given.wrong == wrong
    assert [figure.name for figure in made] == ["results/131072/dropped", "results/131072/kept"]
    assert [(figure.unit, figure.aim) for figure in made] == [("ratio", 1 / 1.3)] * 2
