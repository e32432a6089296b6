"""Top-k: send the largest gradients of a bucket only, and add the others to those of the next step.

    from top_k import top_k
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1), hook=top_k(0.01))

Error feedback (Karimireddy et al., arXiv:1901.09847): nothing is lost. An entry travels as 8 bytes, place and value, to
every other rank; below a density of about 1 / ranks that is less than an all-reduce.
"""

import numpy as np

from overlap import parallel


def top_k(density: float = 0.01) -> parallel.Hook:
    """Return a hook that sends this share of a bucket's gradients; the rest is in `bucket.state["error"]`."""

    def take_largest(values: np.ndarray, error: np.ndarray, entries: int) -> np.ndarray:
        error += values.astype(np.float32, copy=False)
        places = np.sort(np.argpartition(np.abs(error), error.size - entries)[error.size - entries :])
        sent = error[places]
        error[places] = 0
        return np.concatenate([places.astype(np.uint32), sent.view(np.uint32)])

    def mean_of_entries(everything: np.ndarray, ranks: int, like: np.ndarray) -> np.ndarray:
        total = np.zeros(like.size, np.float32)
        for places, values in everything.reshape(ranks, 2, -1):  # no place comes twice from one rank
            total[places] += values.view(np.float32)
        return (total / np.float32(ranks)).astype(like.dtype)

    async def hook(bucket: parallel.GradientBucket) -> np.ndarray:
        entries = max(1, round(density * bucket.buffer.size))
        error = bucket.state.setdefault("error", np.zeros(bucket.buffer.size, np.float32))
        cost = {"stream": "hooks", "bytes_moved": 6 * bucket.buffer.nbytes}
        # The function changes the error, and arguments are read-only: it is bound by the lambda.
        sent = bucket.rank.compute(lambda values: take_largest(values, error, entries), bucket.buffer, **cost)
        everything = await bucket.group.all_gather(await sent, priority=bucket.priority)
        return await bucket.rank.compute(mean_of_entries, everything, bucket.group.size, bucket.buffer, **cost)

    return hook
