"""Expert parallel by `all_to_all(counts=)`: each token travels to the rank of its expert, and its output travels back.

Each rank has the tokens of its own batch and two of eight experts, each a matrix. A router on all ranks chooses one
expert for each token, so numbers of rows differ from pair to pair of ranks: one small all_gather tells them to all.
Gradients of experts stay where the experts are; that of the router is averaged.

You will see the loss fall, and the number of tokens of each rank's experts in the last step.

    python examples/26_expert_parallel.py
"""

import numpy as np

import overlap

EXPERTS, WIDTH, TOKENS, STEPS, RATE = 8, 16, 64, 60, 0.2


def route(router: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the share of the chosen expert, the chosen expert, and the order of the tokens by expert."""
    scores = np.exp(x @ router)
    shares = scores / scores.sum(1, keepdims=True)
    chosen = shares.argmax(1)
    return shares, chosen, np.argsort(chosen, kind="stable")


def split_by_expert(rows: np.ndarray, counts: np.ndarray) -> list[list[np.ndarray]]:
    """Return rows that come from each rank in the order of experts: `counts[rank][expert]` of them."""
    parts = np.split(rows, np.cumsum(counts.reshape(-1))[:-1])
    return [parts[expert :: counts.shape[1]] for expert in range(counts.shape[1])]


def join_by_rank(parts: list[list[np.ndarray]]) -> np.ndarray:
    """Return the rows of `split_by_expert` in the order in which they came."""
    return np.concatenate([parts[expert][rank] for rank in range(len(parts[0])) for expert in range(len(parts))])


async def train(rank: overlap.Rank) -> tuple[list[float], int]:
    shared, own = np.random.default_rng(0), np.random.default_rng(rank.rank + 1)
    each = EXPERTS // rank.world_size
    target = shared.standard_normal((WIDTH, WIDTH)) / 4
    router = shared.standard_normal((WIDTH, EXPERTS)) / 4
    experts = shared.standard_normal((EXPERTS, WIDTH, WIDTH))[each * rank.rank : each * (rank.rank + 1)] / 8
    x = own.standard_normal((TOKENS, WIDTH))
    losses = []
    for step in range(STEPS):
        with rank.step(step):
            shares, chosen, order = route(router, x)
            counts = await rank.all_gather(np.bincount(chosen, minlength=EXPERTS), name="tokens of each expert")
            table = counts.reshape(rank.world_size, rank.world_size, each)  # source, rank of the expert, expert there
            there = table.sum(2)
            received = await rank.all_to_all(x[order], counts=there, name="tokens to experts")
            inputs = split_by_expert(received, table[:, rank.rank])
            outputs = join_by_rank([[part @ w for part in parts] for w, parts in zip(experts, inputs, strict=True)])
            back = await rank.all_to_all(outputs, counts=there.T, name="outputs to tokens")
            y, gate = np.empty_like(x), shares[np.arange(TOKENS), chosen][:, None]
            y[order] = back
            dy = 2 * (gate * y - np.sin(x @ target)) / (TOKENS * rank.world_size)
            losses.append(float(((gate * y - np.sin(x @ target)) ** 2).mean()))

            d_gate = (dy * y).sum(1, keepdims=True) * gate
            reduced = rank.all_reduce(x.T @ (d_gate * (np.eye(EXPERTS)[chosen] - shares)), name="router")  # travels
            d_rows = await rank.all_to_all((dy * gate)[order], counts=there, name="gradients to experts")
            grads = split_by_expert(d_rows, table[:, rank.rank])
            for expert, (rows, d_out) in enumerate(zip(inputs, grads, strict=True)):
                experts[expert] -= WIDTH * RATE * (np.concatenate(rows).T @ np.concatenate(d_out))
            router = router - RATE * await reduced
    mean = await rank.all_reduce(np.array([losses[0], losses[-1]]), op="mean")
    return mean.tolist(), len(received)


if __name__ == "__main__":
    results = overlap.run(train, ranks=4)
    first, last = results[0][0]
    print(f"loss {first:.3f} at first, {last:.3f} after {STEPS} steps")
    for number, (_, rows) in enumerate(results):
        print(f"rank {number}: {rows} tokens for its {EXPERTS // len(results)} experts")
