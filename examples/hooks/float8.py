"""float8: a quarter of the bytes, and 4 bits of each gradient, or 3 with `ml_dtypes.float8_e5m2`.

    from float8 import float8
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1), hook=float8())

Nothing is added up in float8: each rank gets its piece of all buckets, adds it in float32, and sends the mean on. One
scale of a bucket, a power of two that all ranks take from the largest gradient of all, keeps replicas equal.
"""

from math import frexp, isfinite, ldexp

import ml_dtypes
import numpy as np

from overlap import parallel


def float8(dtype: type = ml_dtypes.float8_e4m3fn) -> parallel.Hook:
    """Return a hook that sends gradients as this type. Values below 2**-18 of the largest are lost."""
    top = float(ml_dtypes.finfo(dtype).max)

    def scale_of(largest: np.ndarray) -> np.float32:
        value = float(largest[0])
        if not isfinite(value) or value == 0:
            return np.float32(1)
        return np.float32(ldexp(1.0, max(-126, min(frexp(top)[1] - frexp(value)[1] - 1, 126))))

    def narrow_values(values: np.ndarray, largest: np.ndarray, ranks: int) -> np.ndarray:
        padded = np.concatenate([values, np.zeros(-values.size % ranks, values.dtype)])
        return (padded.astype(np.float32) * scale_of(largest)).astype(dtype)

    def mean_of_pieces(pieces: np.ndarray, ranks: int) -> np.ndarray:
        return pieces.reshape(ranks, -1).astype(np.float32).mean(axis=0).astype(dtype)

    def widen_values(means: np.ndarray, largest: np.ndarray, like: np.ndarray) -> np.ndarray:
        return (means[: like.size].astype(np.float32) / scale_of(largest)).astype(like.dtype)

    async def hook(bucket: parallel.GradientBucket) -> np.ndarray:
        group, rank, priority = bucket.group, bucket.rank, bucket.priority
        cost = {"stream": "hooks", "bytes_moved": 2 * bucket.buffer.nbytes}
        own = rank.compute(lambda values: np.array([np.abs(values).max(initial=0)], "f8"), bucket.buffer, **cost)
        largest = await group.all_reduce(await own, op="max", priority=priority)
        sent = await rank.compute(narrow_values, bucket.buffer, largest, group.size, **cost)
        pieces = await group.all_to_all(sent, priority=priority)
        means = await group.all_gather(
            await rank.compute(mean_of_pieces, pieces, group.size, **cost), priority=priority
        )
        return await rank.compute(widen_values, means, largest, bucket.buffer, **cost)

    return hook
