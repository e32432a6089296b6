"""The hooks that are examples: what comes back, to the last bit, and what is left for later steps."""

import ml_dtypes
import numpy as np
import pytest

from tests.parallel.example_hooks import float8, power_sgd, top_k
from tests.parallel.test_hooks import gradients, mean, means

MATRIX = ((40, 30), (7,))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("size", [1, 7, 300])
def test_float8_is_added_up_in_float32(dtype, size):
    given = gradients(4, size)
    top, largest = float(ml_dtypes.finfo(dtype).max), max(np.abs(x).max() for x in given)
    scale = np.float32(2.0 ** (np.frexp(top)[1] - np.frexp(largest)[1] - 1))
    total = mean([(x * scale).astype(dtype) for x in given])
    expected = total.astype(dtype).astype(np.float32) / scale
    for (found,), _ in means(float8(dtype), given):
        assert found.tobytes() == expected.tobytes()
        assert np.abs(found - mean(given)).max() <= 2.0**-2 * largest


def test_top_k_sends_the_largest_and_keeps_the_rest():
    given = [np.array([1, -5, 2, 0.5], np.float32), np.array([4, 1, -3, 0.25], np.float32)]
    (found, state), (other, other_state) = means(top_k(0.5), given)
    assert found[0].tolist() == other[0].tolist() == [2, -2.5, -0.5, 0]
    assert state["error"].tolist() == [1, 0, 0, 0.5]
    assert other_state["error"].tolist() == [0, 1, 0, 0.25]


def test_top_k_of_everything_is_the_mean():
    given = gradients(3, 100)
    assert means(top_k(1), given)[0][0][0].tobytes() == mean(given).tobytes()


def matrices(ranks, columns):
    """Gradients of a matrix of so many independent columns, and a vector behind it."""
    random = np.random.default_rng(5)
    left = random.standard_normal((40, columns))
    flat = [(left @ random.standard_normal((columns, 30))).reshape(-1) for _ in range(ranks)]
    return [np.concatenate([each, np.arange(7.0)]).astype(np.float32) for each in flat]


def test_power_sgd_sends_everything_at_first():
    given = matrices(3, 9)
    found, _ = means(power_sgd(1, warm_up=2), given, steps=3, shapes=MATRIX)[0]
    assert [each.tobytes() == mean(given).tobytes() for each in found] == [True, True, False]


def test_power_sgd_loses_nothing_of_a_matrix_of_its_rank():
    given = matrices(3, 2)
    results = means(power_sgd(2, warm_up=0), given, steps=2, shapes=MATRIX)
    for found, _ in results:
        np.testing.assert_allclose(found[1], mean(given), rtol=1e-4, atol=1e-4)
        assert found[1].tobytes() == results[0][0][1].tobytes()
        assert found[1][1200:].tolist() == list(range(7))


def test_power_sgd_keeps_what_it_does_not_send():
    """One rank: what came back and what is left are the gradient and what was left before."""
    given = matrices(1, 9)
    found, state = means(power_sgd(2, warm_up=0), given, steps=40, shapes=MATRIX)[0]
    np.testing.assert_allclose(sum(each.astype(np.float64) for each in found) + state["error"], 40 * given[0],
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    size = np.linalg.norm(given[0])
    running = [np.linalg.norm(np.mean(found[:steps], axis=0) - given[0]) / size for steps in (1, 40)]
    assert running[0] > 0.5
    assert running[1] < 0.1


def test_power_sgd_sends_whole_what_would_not_get_smaller():
    given = [x[:12] for x in gradients(2, 20)]
    assert means(power_sgd(4, warm_up=0), given, shapes=((3, 2), (), (5,)))[0][0][0].tobytes() == mean(given).tobytes()
