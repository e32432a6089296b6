"""Bucket hooks: functions that average a bucket of gradients over the group and send fewer bytes than an all-reduce.

A hook is an async function that takes a bucket and returns its mean over the group.
`DataParallel(..., hook=bfloat16())` calls it for each bucket in each step; a hook of your own is one function::

    async def halves(bucket: GradientBucket) -> NDArray[np.float32]:
        mean = await bucket.group.all_reduce(bucket.buffer.astype(np.float16), op="mean")
        return mean.astype(np.float32)

=================  ==============  ============================  ===============================================
hook               bytes sent      collectives in a row          precision of the mean
=================  ==============  ============================  ===============================================
bfloat16           1/2             1 (2 if stochastic)           8 bits, rounded to nearest, or unbiased at random
float16            1/2             2, the first of 8 bytes       11 bits; fewer below 2^-29 of the largest value
=================  ==============  ============================  ===============================================

Bytes are relative to an all-reduce of float32. Computes of hooks run on a compute stream of their own, `hooks`, beside
the backward pass. Hooks of users: `examples/hooks` has float8, top-k and PowerSGD.
"""

from .half import bfloat16, float16

__all__ = ["bfloat16", "float16"]
