"""Sharded weights (FSDP) and tensor parallel on trn2: two communication streams instead of one.

Weights are gathered ahead of their use, gradients are scattered behind it; both are large, and no compute waits for
them yet. Activations are summed over 4 cores, and all computes wait for the sums. On one stream the sums queue behind
the rest; on two they need not, and their stream has the better priority.

You will see the time of a step with one stream and with two, if weights are gathered when they are needed, or one or
two layers ahead. Gathering ahead is most of it; two layers ahead pay on two streams only.
"""

from itertools import product

import ml_dtypes
import trio
from workloads.transformer import Transformer

import overlap

TP, BATCH = 4, 1
MODEL = Transformer(layers=12, hidden=4096, seq=512)
BF16 = ml_dtypes.bfloat16
ACTIVATIONS, WEIGHTS = (BATCH, MODEL.seq, MODEL.hidden), MODEL.layer_parameters // TP


async def train(rank: overlap.Rank, streams: int, ahead: int) -> float:
    mesh = rank.mesh(fsdp=rank.world_size // TP, tp=TP)
    tp, fsdp = mesh["tp"], mesh["fsdp"]
    urgent = rank.stream("tp", priority=0, window=1)
    patient = rank.stream("fsdp", priority=1, window=1) if streams == 2 else urgent
    shard = rank.empty(WEIGHTS // fsdp.size, BF16)
    flops = MODEL.forward_flops(BATCH) / TP

    def layer(*_: object) -> tuple[object, object]:
        return rank.empty(ACTIVATIONS, BF16), rank.empty(WEIGHTS, BF16)

    passes = [("forward", flops)] * MODEL.layers + [("backward", 2 * flops)] * MODEL.layers
    gathered, scattered = [], []
    with rank.step(0):
        x = rank.empty(ACTIVATIONS, BF16)
        for index, (name, cost) in enumerate(passes):
            while len(gathered) < min(index + 1 + ahead, len(passes)):
                gathered.append(fsdp.all_gather(shard, stream=patient, name="gather"))
            done = rank.compute(layer, x, gathered[index], name=name, flops=cost)
            x = tp.all_reduce(done[0], stream=urgent, name="sum")
            if name == "backward":
                scattered.append(fsdp.reduce_scatter(done[1], stream=patient, name="scatter"))
            await x  # the next layer's weights are asked for when this one is done
        for future in scattered:
            await future
    return trio.current_time()


if __name__ == "__main__":
    clock = overlap.Virtual(efficiency=0.4, shapes_only=True)
    print("streams  layers ahead  step (ms)")
    for ahead, streams in product((0, 1, 2), (1, 2)):
        step_s = overlap.run(train, streams, ahead, cluster="trn2.48xlarge", clock=clock)[0]
        print(f"{streams:7}  {ahead:12}  {step_s * 1e3:.6f}")
