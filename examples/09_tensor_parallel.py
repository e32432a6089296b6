"""8-way tensor parallel x data parallel on trn1.32xlarge: 4 replicas on one instance, 64 on 16 instances.

Each layer's activations are summed over 8 neighbouring cores, twice forward and twice backward: nothing can be computed
meanwhile. Its gradients are averaged over the replicas while the layers before it go on.

You will see the time of a step on one instance and on 16, where the gradients cross the network: averaged at the end of
the step, and each as soon as it exists.
"""

import ml_dtypes
import trio
from workloads.transformer import Transformer

import overlap

TP, BATCH = 8, 4
MODEL = Transformer(layers=4, hidden=4096, seq=2048)
BF16 = ml_dtypes.bfloat16
ACTIVATIONS = BATCH, MODEL.seq, MODEL.hidden


async def train(rank: overlap.Rank, at_once: bool) -> float:
    mesh = rank.mesh(dp=rank.world_size // TP, tp=TP)
    tp, dp, data = mesh["tp"], mesh["dp"], rank.stream("data", priority=1)
    flops = MODEL.forward_flops(BATCH) / TP / 2  # of a half: attention, or the perceptron

    def half(_: object) -> object:
        return rank.empty(ACTIVATIONS, BF16)

    def backward(_: object) -> tuple[object, object]:
        return rank.empty(ACTIVATIONS, BF16), rank.empty(MODEL.layer_parameters // TP // 2, BF16)

    with rank.step(0):
        x, gradients = rank.empty(ACTIVATIONS, BF16), []
        for _ in range(2 * MODEL.layers):
            x = tp.all_reduce(rank.compute(half, x, flops=flops))
        for _ in range(2 * MODEL.layers):
            back = rank.compute(backward, x, flops=2 * flops)
            x = tp.all_reduce(back[0])
            gradients.append(back[1])
            if at_once:
                gradients[-1] = dp.all_reduce(back[1], op="mean", stream=data)
        await x
        for gradient in gradients:
            await (gradient if at_once else dp.all_reduce(gradient, op="mean", stream=data))
    return trio.current_time()


if __name__ == "__main__":
    clock = overlap.Virtual(efficiency=0.4, shapes_only=True)
    print("instances  replicas  gradients at the end  gradients at once")
    for instances in (1, 16):
        cluster = f"trn1.32xlarge x{instances}"
        last_s, first_s = (overlap.run(train, at_once, cluster=cluster, clock=clock)[0] for at_once in (False, True))
        print(f"{instances:9}  {instances * 32 // TP:8}  {last_s * 1e3:17.6f} ms  {first_s * 1e3:14.6f} ms")
