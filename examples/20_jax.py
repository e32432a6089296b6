"""A data-parallel loop in JAX: each layer's gradient travels while the layers below it compute.

Arrays of JAX go into operations as they are, and results become arrays of JAX by DLPack, both without a copy. JAX never
writes an array, so nothing is done in place, and `out=` takes none of them.

You will see the loss fall on both ranks alike. It needs JAX: pip install jax

    python examples/20_jax.py 100     steps; 30 by default
"""

import sys

import jax
import jax.numpy as jnp

import overlap

LAYERS, WIDTH, RATE = 4, 64, 0.5


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def pull(back: object, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.block_until_ready(back(grad))  # computed here, not when it is sent


def descend(w: jax.Array, gradient: jax.Array) -> jax.Array:
    return w - RATE * gradient


async def train(rank: overlap.Rank, steps: int) -> list[float]:
    first, data = jax.random.split(jax.random.key(0))
    weights = list(jax.random.normal(first, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5)  # the same on all ranks
    x, y = jax.random.uniform(jax.random.fold_in(data, rank.rank), (2, 128, WIDTH))  # other samples on each
    losses = []
    for step in range(steps):
        with rank.step(step):
            out, backs, pending = x, [], []
            for w in weights:
                forward = rank.compute(jax.vjp, layer, w, out, name="forward")
                out, back = forward[0], forward[1]
                backs.append(back)
            grad = rank.compute(lambda out: (out - y) / len(out), out, name="difference")
            for back in reversed(backs):
                both = rank.compute(pull, back, grad, name="backward")  # of the weight, and of what came in
                grad = both[1]
                pending.append(rank.all_reduce(both[0], op="mean"))  # travels under the layers below
            for index, reduced in zip(reversed(range(LAYERS)), pending, strict=True):
                weights[index] = rank.compute(descend, weights[index], jax.dlpack.from_dlpack(await reduced))
            loss = await rank.all_reduce(jnp.mean((await out - y) ** 2), op="mean")
            losses.append(float(loss))
    return losses


if __name__ == "__main__":
    first, second = overlap.run(train, int(sys.argv[1]) if sys.argv[1:] else 30, ranks=2)
    print(f"loss {first[0]:.3f}, at the end {first[-1]:.3f}; on both ranks alike: {first == second}")
