"""A character-level GPT in numpy, every backward pass written by hand, and the text that it learns.

A layer is two plain functions that remember nothing: `forward(weights, x)` returns the output and the values for
backward; `backward(weights, saved, dy)` returns the gradients of `x` and of the weights, in such a dict.
So a layer runs wherever its weights are: on every rank, on the rank of its stage, or on all ranks of a tensor group,
each with some of its heads and units.

Linear layers have no biases and the norm no shift, as in Llama (arXiv:2302.13971). Letters: B texts of T characters,
C channels, H heads of D channels each, U hidden units, V different characters.
"""

import sysconfig
from pathlib import Path

import numpy as np

Array = np.ndarray
Weights = dict[str, Array]

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # V = 96; whatever else is in the text becomes "?"


# -- the text --------------------------------------------------------------------------------------------------------


def standard_library(characters: int = 1_000_000) -> Array:
    """Return the beginning of the source text of Python's own standard library: the places of its letters in ALPHABET.

    Files are read in alphabetical order. Other versions of Python have other text, so losses differ a little.
    """
    text, folder = "", Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(folder.glob("*.py")):
        text += file.read_text(encoding="utf-8")
        if len(text) >= characters:
            break
    codes = np.full(0x110000, ALPHABET.index("?"), np.uint8)
    codes[[ord(letter) for letter in ALPHABET]] = range(len(ALPHABET))
    return codes[[ord(letter) for letter in text[:characters]]]


def batch(text: Array, step: int, *, texts: int, length: int, rank: int = 0, ranks: int = 1) -> tuple[Array, Array]:
    """Return a rank's share of a step's texts and of the letters to predict, both (B / ranks, T).

    All ranks together have the same texts, however many ranks there are.
    """
    begin = np.random.default_rng(step).integers(len(text) - length, size=texts)[rank::ranks, None]
    return text[begin + np.arange(length)], text[begin + np.arange(1, length + 1)]


# -- pieces of layers ------------------------------------------------------------------------------------------------


def norm(gain: Array, x: Array) -> tuple[Array, tuple[Array, Array]]:
    """Layer norm: bring each position's channels to mean 0 and variance 1, times a gain."""
    centred = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(1e-5))
    normal = centred * scale
    return normal * gain, (normal, scale)


def norm_backward(gain: Array, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    """Return the gradients of `x` and of the gain."""
    normal, scale = saved
    d = dy * gain
    dx = scale * (d - d.mean(-1, keepdims=True) - normal * (d * normal).mean(-1, keepdims=True))
    return dx, (dy * normal).sum((0, 1))


def rows(x: Array) -> Array:
    """Look at (B, T, ...) as a matrix of B*T rows: one large product is faster than B small ones."""
    return x.reshape(x.shape[0] * x.shape[1], -1)


_GELU, _CUBIC = np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)


def gelu(x: Array) -> tuple[Array, Array]:
    """Return the activation, and its slope (Hendrycks and Gimpel, arXiv:1606.08415, in the form with tanh)."""
    square = x * x
    t = np.tanh(_GELU * x * (1 + _CUBIC * square))
    half = np.float32(0.5)
    return half * x * (1 + t), half * (1 + t) + half * x * (1 - t * t) * _GELU * (1 + 3 * _CUBIC * square)


# -- layers ----------------------------------------------------------------------------------------------------------


class Embedding:
    """(B, T) letters to (B, T, C): a row for the letter plus a row for its place."""

    def forward(self, w: Weights, x: Array) -> tuple[Array, object]:
        """Look the rows up."""
        return w["letter"][x] + w["place"][: x.shape[1]], x

    def backward(self, w: Weights, x: Array, dy: Array) -> tuple[None, Weights]:
        """Add up the gradients of each row; letters have no gradient."""
        letter, place = np.zeros_like(w["letter"]), np.zeros_like(w["place"])
        np.add.at(letter, x, dy)
        place[: x.shape[1]] = dy.sum(0)
        return None, {"letter": letter, "place": place}


class Attention:
    """x + a sum over heads: each position looks at earlier ones. `qkv` is (3, C, H*D), `out` is (H*D, C).

    Args:
        width: D, the channels of a head; how many heads there are, the weights tell.
        share: How much of `x` to add: where t ranks with some of the heads each add up their outputs, 1 / t.
    """

    def __init__(self, width: int, share: float = 1.0) -> None:
        self.width, self.share = width, np.float32(share)

    def forward(self, w: Weights, x: Array) -> tuple[Array, object]:
        """softmax(q k^T / sqrt(D)) v, over positions that are not later."""
        b, t, _ = x.shape
        h, normed = norm(w["norm"], x)
        q, k, v = (np.matmul(rows(h), w["qkv"]).reshape(3, b, t, -1, self.width)).swapaxes(2, 3)
        scores = q @ k.swapaxes(2, 3) * np.float32(self.width**-0.5)
        scores += np.triu(np.full((t, t), -np.inf, x.dtype), 1)
        attended = np.exp(scores - scores.max(-1, keepdims=True))
        attended /= attended.sum(-1, keepdims=True)
        mixed = (attended @ v).swapaxes(1, 2).reshape(b * t, -1)
        return self.share * x + (mixed @ w["out"]).reshape(x.shape), (h, normed, q, k, v, attended, mixed)

    def backward(self, w: Weights, saved: tuple, dy: Array) -> tuple[Array, Weights]:
        """Go back through out, mixing, softmax, scores, qkv, norm."""
        h, normed, q, k, v, attended, mixed = saved
        dmixed = (rows(dy) @ w["out"].T).reshape(q.shape[0], q.shape[2], -1, self.width).swapaxes(1, 2)
        d = dmixed @ v.swapaxes(2, 3)
        d = attended * (d - (d * attended).sum(-1, keepdims=True)) * np.float32(self.width**-0.5)
        three = np.stack([d @ k, d.swapaxes(2, 3) @ q, attended.swapaxes(2, 3) @ dmixed])
        three = three.swapaxes(2, 3).reshape(3, len(mixed), -1)
        dh = np.matmul(three, w["qkv"].swapaxes(1, 2)).sum(0).reshape(h.shape)
        dx, dgain = norm_backward(w["norm"], normed, dh)
        return self.share * dy + dx, {"norm": dgain, "qkv": rows(h).T @ three, "out": mixed.T @ rows(dy)}


class Perceptron:
    """x + gelu(x `up`) `down`, of the normed x. `up` is (C, U), `down` is (U, C); `share` as for `Attention`."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = np.float32(share)

    def forward(self, w: Weights, x: Array) -> tuple[Array, object]:
        """Norm, up, gelu, down."""
        h, normed = norm(w["norm"], x)
        active, slope = gelu(rows(h) @ w["up"])
        return self.share * x + (active @ w["down"]).reshape(x.shape), (h, normed, active, slope)

    def backward(self, w: Weights, saved: tuple, dy: Array) -> tuple[Array, Weights]:
        """Go back through the functions of forward."""
        h, normed, active, slope = saved
        d = rows(dy) @ w["down"].T * slope
        dx, dgain = norm_backward(w["norm"], normed, (d @ w["up"].T).reshape(h.shape))
        return self.share * dy + dx, {"norm": dgain, "up": rows(h).T @ d, "down": active.T @ rows(dy)}


class Head:
    """(B, T, C) to (B, T, V): for each letter, how likely it comes next (the logarithm, but for a constant)."""

    def forward(self, w: Weights, x: Array) -> tuple[Array, object]:
        """Norm, and one product."""
        h, normed = norm(w["norm"], x)
        return h @ w["letter"], (h, normed)

    def backward(self, w: Weights, saved: tuple, dy: Array) -> tuple[Array, Weights]:
        """Go back through the functions of forward."""
        h, normed = saved
        dx, dgain = norm_backward(w["norm"], normed, dy @ w["letter"].T)
        return dx, {"norm": dgain, "letter": rows(h).T @ rows(dy)}


def cross_entropy(scores: Array, y: Array) -> tuple[Array, float]:
    """Return the gradient of the scores, and the loss: the mean of -log(probability) of the letters that came."""
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    came = (*np.indices(y.shape), y)
    loss = -float(np.log(p[came]).mean())
    p[came] -= 1
    return p / np.asarray(y.size, p.dtype), loss


# -- the whole -------------------------------------------------------------------------------------------------------


class GPT:
    """Layers by name, in order, and weights to begin with.

    Args:
        blocks: How many times attention and a perceptron.
        channels: C; a perceptron has 4C units.
        heads: H, a divisor of C.
        length: The longest text.
        share: Of the residual that each layer adds; see `Attention`.
    """

    def __init__(self, blocks: int = 2, channels: int = 64, heads: int = 4, length: int = 64, share: float = 1.0):
        self.blocks, self.channels, self.length = blocks, channels, length
        attention, perceptron = Attention(channels // heads, share), Perceptron(share)
        inner = {
            f"{kind}{i}": layer for i in range(blocks) for kind, layer in (("attend", attention), ("mlp", perceptron))
        }
        self.inner = frozenset(inner)  # the names of weights that can be cut into heads and units
        self.layers = {"embed": Embedding(), **inner, "head": Head()}

    def weights(self, seed: int = 0, dtype: type = np.float32) -> dict[str, Weights]:
        """Draw them as GPT-2 does: normal of size 0.02, weights that add to the residual smaller by the root of its
        depth."""
        random, c = np.random.default_rng(seed), self.channels

        def draw(*shape: int, size: float = 0.02) -> Array:
            return (size * random.standard_normal(shape)).astype(dtype)

        deep = 0.02 / (2 * self.blocks) ** 0.5
        shapes = {
            "embed": lambda: {"letter": draw(len(ALPHABET), c), "place": draw(self.length, c)},
            "attend": lambda: {"norm": np.ones(c, dtype), "qkv": draw(3, c, c), "out": draw(c, c, size=deep)},
            "mlp": lambda: {"norm": np.ones(c, dtype), "up": draw(c, 4 * c), "down": draw(4 * c, c, size=deep)},
            "head": lambda: {"norm": np.ones(c, dtype), "letter": draw(c, len(ALPHABET))},
        }
        return {name: shapes[name.rstrip("0123456789")]() for name in self.layers}

    def gradients(self, weights: dict[str, Weights], x: Array, y: Array) -> tuple[dict[str, Weights], float]:
        """Return the gradients of all weights, and the loss: a whole step in one piece."""
        saved, found = {}, {}
        for name, layer in self.layers.items():
            x, saved[name] = layer.forward(weights[name], x)
        grad, loss = cross_entropy(x, y)
        for name, layer in reversed(self.layers.items()):
            grad, found[name] = layer.backward(weights[name], saved[name], grad)
        return {name: found[name] for name in self.layers}, loss

    def flat_gradient(self, weights: Array, x: Array, y: Array) -> tuple[Array, float]:
        """Return the result of `gradients` for weights in one flat array, as one."""
        found, loss = self.gradients(unflatten_weights(self.weights(), weights), x, y)
        return flatten_weights(found), loss


def flatten_weights(weights: dict[str, Weights]) -> Array:
    """Return all weights in one array, in the order of layers."""
    return np.concatenate([w.reshape(-1) for layer in weights.values() for w in layer.values()])


def unflatten_weights(like: dict[str, Weights], weights: Array) -> dict[str, Weights]:
    """Return parts of one array in the form of other weights."""
    found, start = {}, 0
    for layer, old in like.items():
        found[layer] = {}
        for name, w in old.items():
            found[layer][name] = weights[start : start + w.size].reshape(w.shape)
            start += w.size
    return found


def mean_gradients(a: Weights, b: Weights) -> Weights:
    """Return the mean of the gradients of two halves of a batch, array by array."""
    return {name: (a[name] + b[name]) / 2 for name in a}


def tensor_rank_part(weights: dict[str, Weights], index: int, parts: int) -> dict[str, Weights]:
    """Return a tensor rank's part of all weights: of each layer some heads and some units, the rest whole."""
    axes = {"qkv": 2, "out": 0, "up": 1, "down": 0}

    def cut(name: str, w: Array) -> Array:
        return np.ascontiguousarray(np.split(w, parts, axes[name])[index]) if name in axes else w.copy()

    return {layer: {name: cut(name, w) for name, w in whole.items()} for layer, whole in weights.items()}
