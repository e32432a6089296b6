"""The model that the examples train: its gradients against finite differences, and what cutting it leaves the same."""

import runpy
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parents[2] / "examples" / "models" / "gpt.py"
EPSILON = 1e-5  # of central differences in float64, whose error is then of the order of 1e-9
RELATIVE, FLOOR = 1e-7, 1e-8


@pytest.fixture(scope="module")
def gpt():
    return runpy.run_path(str(FILE))


def large(weights, seed=1):
    """Weights ten times the usual size: with those to begin with, a layer is so linear that mistakes would hide."""
    random = np.random.default_rng(seed)
    return {layer: {k: random.normal(0.2, 0.3, w.shape) for k, w in tree.items()} for layer, tree in weights.items()}


def loss_of(gpt, model, weights, x, y):
    for name, layer in model.layers.items():
        x, _ = layer.forward(weights[name], x)
    return gpt["cross_entropy"](x, y)[1]


@pytest.fixture
def small(gpt):
    model = gpt["GPT"](blocks=1, channels=8, heads=2, length=6)
    random = np.random.default_rng(0)
    letters = random.integers(len(gpt["ALPHABET"]), size=(3, 7))
    return model, large(model.weights(dtype=np.float64)), letters[:, :-1], letters[:, 1:]


def test_gradients_are_finite_differences(gpt, small):
    model, weights, x, y = small
    gradients, _ = model.gradients(weights, x, y)
    random = np.random.default_rng(2)
    tried = 0
    for layer, tree in weights.items():
        assert gradients[layer].keys() == tree.keys()
        for key, w in tree.items():
            assert gradients[layer][key].shape == w.shape
            anywhere, not_zero = np.arange(w.size), np.flatnonzero(gradients[layer][key])  # letters that nobody saw
            for index in (*random.choice(anywhere, 6), *random.choice(not_zero, 6)):
                place, found = np.unravel_index(index, w.shape), []
                for sign in (1, -1):
                    was, w[place] = w[place], w[place] + sign * EPSILON
                    found.append(loss_of(gpt, model, weights, x, y))
                    w[place] = was
                numeric = (found[0] - found[1]) / (2 * EPSILON)
                assert gradients[layer][key][place] == pytest.approx(numeric, rel=RELATIVE, abs=FLOOR), (layer, key)
                tried += 1
    assert tried > 100


def test_a_letter_that_nobody_saw_has_no_gradient(gpt, small):
    model, weights, x, y = small
    rows = model.gradients(weights, x, y)[0]["embed"]["letter"]
    assert set(np.flatnonzero(rows.any(axis=1))) == set(x.flat)


def test_one_array_is_as_good_as_a_tree(gpt, small):
    model, weights, x, y = small
    flat = gpt["flat"](weights)
    assert all((w == weights[layer][k]).all() for layer, t in gpt["tree"](weights, flat).items() for k, w in t.items())
    whole, loss = model.flat_gradient(flat, x, y)
    gradients, same_loss = model.gradients(weights, x, y)
    assert loss == same_loss
    for layer, tree in gpt["tree"](weights, whole).items():
        for key, gradient in tree.items():
            assert (gradient == gradients[layer][key]).all()


def test_no_position_sees_what_is_later(gpt, small):
    model, weights, x, _ = small
    other = x.copy()
    other[:, 4:] = (other[:, 4:] + 1) % len(gpt["ALPHABET"])
    for name, layer in model.layers.items():
        x, other = layer.forward(weights[name], x)[0], layer.forward(weights[name], other)[0]
    assert (x[:, :4] == other[:, :4]).all()
    assert (x[:, 4:] != other[:, 4:]).any(axis=-1).all()


def test_the_first_loss_is_that_of_guessing(gpt):
    model = gpt["GPT"]()
    x, y = gpt["batch"](gpt["standard_library"](100_000), 0, texts=16, length=64)
    assert loss_of(gpt, model, model.weights(), x, y) == pytest.approx(np.log(96), rel=0.01)


def test_parts_add_up_to_the_whole(gpt, small):
    model, weights, x, y = small
    gradients, loss = model.gradients(weights, x, y)
    parts = [gpt["part"](weights, i, 2) for i in range(2)]
    half = gpt["GPT"](blocks=1, channels=8, heads=2, length=6, share=0.5)
    saved = [{}, {}]
    for name, layer in half.layers.items():
        told = [layer.forward(part[name], x) for part in parts]
        for index in range(2):
            saved[index][name] = told[index][1]
        x = told[0][0] + told[1][0] if name[-1].isdigit() else told[0][0]
    grad, parted_loss = gpt["cross_entropy"](x, y)
    assert parted_loss == pytest.approx(loss, rel=1e-12)
    for name, layer in reversed(half.layers.items()):
        told = [layer.backward(part[name], saved[i][name], grad) for i, part in enumerate(parts)]
        grad = told[0][0] + told[1][0] if name[-1].isdigit() else told[0][0]
        cut = [gpt["part"](gradients, i, 2)[name] for i in range(2)]
        for key, whole in gradients[name].items():
            if key == "norm" and name[-1].isdigit():  # each has what its heads or units say of it
                assert told[0][1][key] + told[1][1][key] == pytest.approx(whole, rel=1e-10)
            else:
                for i in range(2):
                    assert told[i][1][key] == pytest.approx(cut[i][key], rel=1e-10, abs=1e-14), (name, key)


def test_ranks_share_a_batch(gpt):
    text = gpt["standard_library"](20_000)
    whole = gpt["batch"](text, 5, texts=6, length=9)
    shares = [gpt["batch"](text, 5, texts=6, length=9, rank=r, ranks=3) for r in range(3)]
    for x, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert all((part == x[r::3]).all() for r, part in enumerate(parts))
    assert (whole[0][:, 1:] == whole[1][:, :-1]).all()


def test_the_text_is_the_library_s_own(gpt):
    found = "".join(gpt["ALPHABET"][code] for code in gpt["standard_library"](3000))
    assert found.startswith((Path(runpy.__file__).parent / "__future__.py").read_text()[:1000])
