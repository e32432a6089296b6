"""Peer Direct against host copies: BERT with 5 billion weights, ZeRO-2, on 128 Gaudi of 16 dl1.24xlarge.

Published: 391.44 samples/s with copies through the host, 674.73 with Peer Direct (Habana's document on Peer Direct).
Compute is calibrated on the first figure, so that the second one is a prediction. The document's batch is 12,288, in 4
micro-batches of 24 for each Gaudi. You will see that the prediction is far too low: copies cost 0.3 s for each of the 4
reductions of 10 GB, and the published throughputs differ by 13 s a step. Only a step that were all communication, of
fewer samples than these, would have the published ratio: other costs of host copies are not published.

    HabanaAI/Model-References, deepspeed_config_bert_5b_lans.json: ZeRO-2 in bfloat16, all_reduce in buckets of 150
    million elements, nothing overlapped.
"""

import ml_dtypes
import trio

import overlap

WEIGHTS, BUCKET, GAUDI = 5_000_000_000, 150_000_000, 128
PUBLISHED = {False: 391.44, True: 674.73}  # samples/s without and with Peer Direct
BF16 = ml_dtypes.bfloat16


async def train(rank: overlap.Rank, passes: int, compute_s: float) -> float:
    with rank.step(0):
        for _ in range(passes):  # ZeRO-2 reduces the gradients of every micro-batch
            await rank.compute(rank.empty, WEIGHTS, BF16, name="forward and backward", seconds=compute_s / passes)
            for start in range(0, WEIGHTS, BUCKET):
                await rank.all_reduce(rank.empty(min(BUCKET, WEIGHTS - start), BF16))
        await rank.all_gather(rank.empty(WEIGHTS // GAUDI, BF16))  # each rank updates its part of the weights
    return trio.current_time()


def step_s(passes: int, compute_s: float, *, peer_direct: bool) -> float:
    clock = overlap.Virtual(peer_direct=peer_direct, shapes_only=True)
    return overlap.run(train, passes, compute_s, cluster="dl1.24xlarge x16", clock=clock)[0]


def predict(passes: int, micro_batch: int) -> str:
    samples = passes * micro_batch * GAUDI
    compute_s = samples / PUBLISHED[False] - step_s(passes, 0.0, peer_direct=False)  # nothing is overlapped: it adds up
    rates = [samples / step_s(passes, compute_s, peer_direct=direct) for direct in PUBLISHED]
    figures = f"{compute_s * 1e3:16.6f}  {rates[0]:11.2f}  {rates[1]:11.2f}  {rates[1] / rates[0]:5.2f}"
    return f"{passes} x {micro_batch:<9}{figures}  {rates[1] / PUBLISHED[True] - 1:+6.1%}"


if __name__ == "__main__":
    print("samples      compute in ms  host copies  Peer Direct  ratio   error")
    staged, direct = PUBLISHED.values()
    print(f"{'published':28}  {staged:11.2f}  {direct:11.2f}  {direct / staged:5.2f}")
    print(*(predict(passes, micro_batch) for passes, micro_batch in ((4, 24), (1, 8))), sep="\n")
    ratio = step_s(1, 0.0, peer_direct=False) / step_s(1, 0.0, peer_direct=True)
    print(f"{'no compute at all':54}  {ratio:5.2f}")
