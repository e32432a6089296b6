"""The strategies, hooks and the model that are examples, each as a program, and the example of JAX."""

import ast
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import interpreters
from tests.parallel.example_hooks import float8, power_sgd, top_k
from tests.parallel.test_hooks import gradients, mean, means

# -- the strategies and hooks that are examples, each as a program, and the example of JAX -----------------------------

# -- the strategies, each as a program: the loss falls, and what else they print is true -------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"
GUESSING = 4.56  # log(96): the loss of who knows nothing

SHARED = """\
stage 2, step N: loss LOSS
             measured    formula
parameters  460,032 B  460,032 B
gradients   115,008 B  115,008 B
optimizer   230,016 B  230,016 B
total       805,056 B  805,056 B
OVERLAP
stage 3, step N: loss LOSS
             measured    formula
parameters  115,008 B  115,008 B
gradients   115,008 B  115,008 B
optimizer   230,016 B  230,016 B
total       460,032 B  460,032 B
OVERLAP
"""

# What programs print beside losses, whose digits depend on the processor, and overlap, which depends on its load.
BESIDE = {
    "11_data_parallel": "OVERLAP\n",
    "12_zero": SHARED,
    "13_tensor_and_data": "OVERLAP\n",
    "14_pipeline_1f1b": "SCHEDULE\nOVERLAP\n",
    "15_parameter_server": "gradients taken from each worker: N N N\nOVERLAP\n",
    "16_bfloat16_on_the_wire": "float32: 460,032 bytes a step, loss LOSS\nbfloat16: 230,016 bytes a step, loss LOSS\n",
    "17_pytorch_module": "accuracy PERCENT of 359 test images\nOVERLAP\n",
}

PATTERNS = {
    "LOSS": r"(\d\.\d+)",
    "N": r"(?:\d+)",
    "PERCENT": r"(?:\d+\.\d%)",
    "SCHEDULE": r"time  0(?:.*\n){4}.*",
    "OVERLAP": r"overlap: \d+% of \d+ ms of communication was hidden under compute",
}


def losses_of(name, steps):
    """Run a program; return the losses that it tells, when all else is as it should be."""
    script = EXAMPLES / f"{name}.py"
    done = interpreters.run(script, steps, cwd=EXAMPLES.parent, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r"^step \d+: loss \d\.\d\d\n", "", done.stdout, flags=re.M)
    expected = re.escape(BESIDE[name]).replace("\\ ", " ").replace("\\\n", "\n")
    for word, pattern in PATTERNS.items():
        expected = re.sub(rf"\b{word}\b", lambda _, pattern=pattern: pattern, expected)
    told = re.fullmatch(expected, shown)
    assert told is not None, done.stdout
    lines = re.findall(r"^step (\d+): loss (.*)$", done.stdout, flags=re.M)
    assert [int(step) for step, _ in lines] == ([] if told.groups() else list(range(10, steps + 1, 10)))
    return [float(loss) for _, loss in lines] or [float(loss) for loss in told.groups()]


@pytest.mark.slow
def test_thirty_steps_are_better_than_guessing():
    assert losses_of("11_data_parallel", 30)[-1] < GUESSING - 0.5  # other versions of Python have other text


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_the_loss_falls(name):
    if name.startswith("17") and find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install torch")
    losses = losses_of(name, 60)
    best = 2.5 if name.startswith("17") else GUESSING
    assert min(losses) < best - 1
    if name in ("12_zero", "16_bfloat16_on_the_wire"):
        assert losses[1] == pytest.approx(losses[0], rel=0 if name.startswith("12") else 0.05)
    elif name != "15_parameter_server":  # gradients of old weights make the loss jump for some steps, at any time
        assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["11_data_parallel", "12_zero"])
def test_in_two_processes(name):
    command = ("-m", "overlap", "run", "--processes", "2", "--ranks-per-process", "2", EXAMPLES / f"{name}.py", 20)
    done = interpreters.run(*command, cwd=EXAMPLES.parent, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(loss) for loss in re.findall(r"^\[process 0\] .*loss (\d\.\d+)$", done.stdout, flags=re.M)]
    assert len(losses) == 2
    assert losses[-1] < GUESSING - 0.5


def code_lines(path):
    """Lines of a program without its imports, docstrings and comments."""
    text = path.read_text()
    beside = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            beside |= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            beside |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return [line for number, line in lines if line.strip() and line.strip()[0] != "#" and number not in beside]


@pytest.mark.parametrize("name", BESIDE)
def test_a_strategy_takes_at_most_25_lines_beyond_its_model(name):
    assert 15 < len(code_lines(EXAMPLES / f"{name}.py")) <= 25


# -- the hooks that are examples: what comes back, to the last bit, and what is left for later steps -------------------

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


# -- the example of JAX, where it is installed -------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_ranks_learn_alike():
    pytest.importorskip("jax", reason="not installed: jax")
    script = ROOT / "examples" / "20_jax.py"
    done = subprocess.run([sys.executable, script, "10"], capture_output=True, text=True, timeout=100, check=True)
    words = done.stdout.split()
    assert words[:1] == ["loss"]
    assert done.stdout.endswith("on both ranks alike: True\n")
    assert float(words[5].strip(";")) < float(words[1].strip(","))


# ----------------------------------------------------------------------------------------------------------------------
# The model that the examples train: its gradients against finite differences, and what cutting it leaves the same

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
    flat = gpt["flatten_weights"](weights)
    assert all(
        (w == weights[layer][k]).all()
        for layer, t in gpt["unflatten_weights"](weights, flat).items()
        for k, w in t.items()
    )
    whole, loss = model.flat_gradient(flat, x, y)
    gradients, same_loss = model.gradients(weights, x, y)
    assert loss == same_loss
    for layer, tree in gpt["unflatten_weights"](weights, whole).items():
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
    parts = [gpt["tensor_rank_part"](weights, i, 2) for i in range(2)]
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
        cut = [gpt["tensor_rank_part"](gradients, i, 2)[name] for i in range(2)]
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
