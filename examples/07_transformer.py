"""Data-parallel training of a transformer that fits no memory here: shapes only, on a modelled cluster.

You will see how long a step takes on 64 modelled Trainium cores; gradients travel in buckets under the backward pass.
What if the buckets were larger, or the cluster?

    overlap simulate --nodes 2 examples/07_transformer.py --bucket-bytes 100MiB
"""

import argparse

import ml_dtypes
import trio
from workloads.transformer import Transformer

import overlap
from overlap.units import parse_bytes

BF16 = ml_dtypes.bfloat16
SIZES = {"layers": 24, "hidden": 2048, "seq": 2048, "batch": 4}  # the batch is that of a rank


async def train(rank: overlap.Rank, model: Transformer, batch: int, bucket: int) -> float:
    def backward(full: int, rest: int) -> list[object]:
        return [rank.empty(size, BF16) for size in (*[bucket] * full, rest) if size]

    flops, filled, pending = model.forward_flops(batch), 0, []
    with rank.step(0):
        for _ in range(model.layers):
            rank.compute(rank.empty, (batch, model.seq, model.hidden), BF16, name="forward", flops=flops)
        for layer in reversed(range(model.layers)):
            full, filled = divmod(filled + model.layer_parameters, bucket)
            rest = 0 if layer else filled
            gradients = rank.compute(backward, full, rest, flops=2 * flops)  # the ones that are complete after it
            pending += [rank.all_reduce(gradients[i], op="mean") for i in range(full + (rest > 0))]
        for reduced in pending:
            await reduced
    return trio.current_time()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bucket-bytes", default="25MiB")
    args = parser.parse_args()
    model = Transformer(layers=args.layers, hidden=args.hidden, seq=args.seq)
    bucket = parse_bytes(args.bucket_bytes, argument="--bucket-bytes") // 2
    clock = overlap.Virtual(efficiency=0.4, shapes_only=True)
    steps_s = overlap.run(train, model, args.batch, bucket, cluster="trn2.48xlarge", clock=clock)
    samples_per_step = args.batch * len(steps_s)
    print(f"{model.parameters:,} weights on {len(steps_s)} ranks: a step takes {steps_s[0] * 1e3:.6f} ms,")
    print(f"{samples_per_step / steps_s[0]:.2f} samples per second")
