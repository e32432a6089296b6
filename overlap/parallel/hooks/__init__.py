"""Bucket hooks: how the mean of a bucket gets around, where sending all of its bits would cost more than it gains.

A hook is an async function from a bucket to the mean of it over the group. `DataParallel(..., hook=bfloat16())` calls
it for each bucket in each step; a hook of your own is one function::

    async def halves(bucket: GradientBucket) -> NDArray[np.float32]:
        mean = await bucket.group.all_reduce(bucket.buffer.astype(np.float16), op="mean")
        return mean.astype(np.float32)

=================  ==============  ============================  ===============================================
hook               bytes sent      collectives, one after other  loss of the mean
=================  ==============  ============================  ===============================================
bfloat16           1/2             1 (2 if stochastic)           all but 8 bits, to nearest or unbiased
float16            1/2             2, the first of 4 bytes       all but 11 bits, and values below 2^-29 of the top
=================  ==============  ============================  ===============================================

Bytes are relative to an all-reduce of float32. Computes of hooks run on a compute stream of their own, `hooks`, beside
the backward pass. Hooks of users: `examples/hooks` has float8, top-k and PowerSGD.
"""

from .half import bfloat16, float16

__all__ = ["bfloat16", "float16"]
