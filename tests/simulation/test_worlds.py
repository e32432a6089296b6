"""The same programs in virtual time: exact instants. Results are compared in tests/runtime/test_collectives.py."""

import numpy as np
import pytest
import trio

import overlap
import topology

from .worlds import KB, MS, mesh, now_ns, simulate, spans


def zeros(nbytes):
    return np.zeros(nbytes, np.uint8)


@pytest.mark.parametrize(
    ("kind", "algorithm", "kwargs", "expected_ms"),
    [
        # Each of 8 KB takes 8 ms on a wire of its own; a ring has steps of an eighth.
        ("all_reduce", "ring", {}, 14),
        ("all_gather", "ring", {}, 7 * 8),
        ("reduce_scatter", "ring", {}, 7),
        ("all_to_all", "mesh", {}, 1),
        ("broadcast", "mesh", {"root": 3}, 8),
        ("permute", "mesh", {"pairs": [(0, 5), (5, 0)]}, 8),
    ],
)
def test_a_collective_takes_what_its_steps_take(kind, algorithm, kwargs, expected_ms):
    async def main(rank):
        await getattr(rank, kind)(zeros(8 * KB), **kwargs)
        return now_ns(rank)

    results, timeline = simulate(main, 8, algorithm=algorithm)
    assert max(results) == expected_ms * MS
    assert {span.info.algorithm for span in timeline.spans} == {algorithm}


def test_the_cheapest_algorithm_is_taken():
    async def main(rank):
        await rank.all_reduce(zeros(8 * KB))
        return now_ns(rank)

    results, timeline = simulate(main, 8)
    assert results == [2 * MS] * 8, "every wire at once, to and fro"
    assert {span.info.algorithm for span in timeline.spans} == {"mesh"}


def test_an_algorithm_that_a_collective_does_not_have_is_not_insisted_on():
    async def main(rank):
        await rank.all_reduce(zeros(8 * KB))
        await rank.permute(zeros(KB), [(0, 1)])
        return now_ns(rank)

    results, timeline = simulate(main, 8, algorithm="ring")
    assert max(results) == 15 * MS
    assert {span.info.algorithm for span in timeline.spans} == {"ring", "mesh"}


def test_an_algorithm_that_does_not_fit_the_wires_is_priced_in_its_plain_form():
    async def main(rank):
        await rank.all_gather(zeros(KB))
        return now_ns(rank)

    results, timeline = simulate(main, 8, algorithm="swing")  # which is for tori
    assert results == [3_500_000] * 8, "one, two and four thousand bytes in three steps, half to either side"
    assert {span.info.algorithm for span in timeline.spans} == {"swing"}


def test_communication_hides_behind_compute():
    async def main(rank):
        pending = []
        for layer in range(3):
            grad = rank.compute(zeros, 8 * KB, seconds=0.02, name=f"layer {layer}")
            pending.append(rank.all_reduce(grad, name=f"grad {layer}"))
        for each in pending:
            await each
        return now_ns(rank)

    results, timeline = simulate(main, 8, algorithm="ring")
    assert results == [74 * MS] * 8
    for rank in range(8):
        assert spans(timeline, rank, "compute") == [
            (f"layer {n}", 20 * n * MS, 20 * (n + 1) * MS) for n in range(3)
        ]  # fmt: skip
        assert spans(timeline, rank, "comm") == [
            (f"grad {n}", 20 * (n + 1) * MS, (20 * (n + 1) + 14) * MS) for n in range(3)
        ]  # fmt: skip


def test_compute_streams_run_beside_each_other():
    async def main(rank):
        rank.compute(int, seconds=0.003, name="layer")
        await rank.compute(int, seconds=0.001, name="cast", stream="casts")
        return now_ns(rank)

    results, timeline = simulate(main, 2)
    assert results == [MS] * 2
    assert {(span.lane, span.name, span.start_ns, span.end_ns) for span in timeline.spans} == {
        ("compute", "layer", 0, 3 * MS), ("casts", "cast", 0, MS)
    }  # fmt: skip


def test_futures_feed_computes_and_collectives():
    async def main(rank):
        both = rank.compute(lambda: (np.full(4, rank.rank), np.ones(2)), seconds=0.001)
        total = rank.all_reduce(both[0])
        twice = rank.compute(lambda parts: 2 * parts["total"] + parts["ones"][0], {"total": total, "ones": both[1]},
                             seconds=0.002)  # fmt: skip
        return (await rank.all_gather(twice)).tolist(), now_ns(rank)

    results, _ = simulate(main, 2, algorithm="ring")
    # 32 bytes reduced in two steps of 16 us, 64 gathered in one of 32.
    assert results == [([3.0] * 8, 3 * MS + 2 * 16_000 + 32_000)] * 2


def test_a_late_rank_is_waited_for():
    async def main(rank):
        await trio.sleep(0.005 * rank.rank)
        await rank.all_reduce(zeros(8 * KB))
        return now_ns(rank)

    results, timeline = simulate(main, 8, algorithm="mesh")
    assert max(results) == 37 * MS
    first = timeline.for_rank(0)[0]
    assert (first.start_ns, first.info.met_ns, first.info.last_rank_wait_ns) == (0, 35 * MS, 35 * MS)


def test_one_stream_is_a_fifo():
    async def main(rank):
        issued = [rank.all_reduce(zeros(8 * KB), name=f"{n}") for n in range(3)]
        ends = []
        for each in issued:
            await each
            ends.append(now_ns(rank))
        return ends

    results, timeline = simulate(main, 8, algorithm="ring")
    assert results == [[14 * MS, 28 * MS, 42 * MS]] * 8
    assert {span.start_ns for span in timeline.spans} == {0}, "all three are in the window"


def test_a_window_is_what_starts():
    async def main(rank):
        narrow = rank.stream("narrow", window=1)
        await rank.compute(lambda: None, seconds=0.001)
        issued = [rank.all_reduce(zeros(8 * KB), stream=narrow, name=f"{n}") for n in range(3)]
        for each in issued:
            await each

    _, timeline = simulate(main, 8, algorithm="ring")
    assert spans(timeline, 5, "narrow") == [(f"{n}", (1 + 14 * n) * MS, (15 + 14 * n) * MS) for n in range(3)]
    assert [span.info.queue_wait_ns for span in timeline.for_rank(5)[1:]] == [0, 14 * MS, 28 * MS]


def test_streams_share_wires_fairly():
    async def main(rank):
        one, two = rank.stream("one"), rank.stream("two")
        first = rank.all_reduce(zeros(8 * KB), stream=one)
        await trio.sleep(0.007)
        await rank.all_reduce(zeros(8 * KB), stream=two)
        await first
        return now_ns(rank)

    results, timeline = simulate(main, 8, algorithm="ring")
    assert results == [28 * MS] * 8
    # From 7 on half each: the first has half to go.
    assert spans(timeline, 0, "one") == [("all_reduce", 0, 21 * MS)]
    assert spans(timeline, 0, "two") == [("all_reduce", 7 * MS, 28 * MS)]


@pytest.mark.parametrize("by", ["operation", "stream"])
def test_the_more_urgent_one_goes_first(by):
    async def main(rank):
        urgent = rank.stream("urgent", priority=-1 if by == "stream" else 0)
        first = rank.all_reduce(zeros(8 * KB))
        await trio.sleep(0.007)
        await rank.all_reduce(zeros(8 * KB), stream=urgent, priority=-1 if by == "operation" else 0)
        await first

    _, timeline = simulate(main, 8, algorithm="ring")
    assert spans(timeline, 0, "urgent") == [("all_reduce", 7 * MS, 21 * MS)]
    assert spans(timeline, 0, "comm") == [("all_reduce", 0, 28 * MS)]


def test_messages_take_their_bytes_and_the_latency():
    async def main(rank):
        if rank.rank == 0:
            sent = rank.send(np.arange(1000), 1)
            await sent
        else:
            got = await rank.recv(((1000,), np.int64), 0)
            assert np.array_equal(got, np.arange(1000))
        return now_ns(rank)

    results, timeline = simulate(main, 2, cluster=mesh(2, latency_s=0.001))
    assert results == [8 * MS, 9 * MS]
    assert [(each.name, each.info.op) for each in timeline.spans] == [("send", "send/recv"), ("recv", "send/recv")]


def test_a_message_waits_for_its_receiver_on_the_way():
    async def main(rank):
        if rank.rank == 0:
            await rank.send(zeros(8 * KB), 1)
        else:
            await trio.sleep(0.1)
            await rank.recv(((8 * KB,), np.uint8), 0)
        return now_ns(rank)

    assert simulate(main, 2)[0] == [100 * MS, 100 * MS], "it had come before"


@pytest.mark.parametrize(
    ("pair", "message_ms", "permute_ms"), [((0, 1), 20, 25), ((1, 0), 10, 15)], ids=["the same way", "the other way"]
)
def test_a_message_shares_the_wire_of_its_own_direction_only(pair, message_ms, permute_ms):
    """10 KB from rank 0 to rank 1 beside a permute of 15 KB."""

    async def main(rank):
        message = rank.recv(((10 * KB,), np.uint8), 0) if rank.rank else rank.send(zeros(10 * KB), 1)
        await rank.permute(zeros(15 * KB), [pair])
        await message

    _, timeline = simulate(main, 2)
    assert {each.info.op: each.end_ns for each in timeline.for_rank(1 - pair[0])} == {
        "permute": permute_ms * MS, "send/recv": message_ms * MS,
    }  # fmt: skip


def test_a_ring_of_messages():
    async def main(rank):
        right, left = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
        x = np.full(KB, rank.rank, np.uint8)
        for _ in range(rank.world_size):
            rank.send(x, right)
            x = await rank.recv(((KB,), np.uint8), left)
        return int(x[0]), now_ns(rank)

    assert simulate(main, 4)[0] == [(rank, 4 * MS) for rank in range(4)]


def test_groups_have_wires_of_their_own():
    async def main(rank):
        mesh_of = rank.mesh(dp=2, tp=4)
        tensor, data = mesh_of["tp"], mesh_of["dp"]
        both = [tensor.all_reduce(np.full(8, rank.rank), name="tp"), data.all_reduce(np.full(8, rank.rank), name="dp")]
        sums = [int((await each)[0]) for each in both]
        half = await rank.split(rank.rank % 2)
        await half.barrier()
        return sums, half.ranks, now_ns(rank)

    results, timeline = simulate(main, 8, algorithm="ring")
    # Four ranks in six steps of 16 bytes, two in two of 32; no two of them on one wire.
    assert spans(timeline, 5)[:2] == [("dp", 0, 2 * 32_000), ("tp", 0, 6 * 16_000)]
    assert results[5] == ([4 + 5 + 6 + 7, 1 + 5], (1, 3, 5, 7), results[0][2])
    assert {result[2] for result in results} == {results[0][2]}


def test_time_outs_live_in_virtual_time():
    async def main(rank):
        with trio.move_on_after(0.25) as scope:
            await trio.sleep(3600)
        with trio.move_on_after(1) as other:
            await rank.all_reduce(zeros(8 * KB))
        return scope.cancelled_caught, other.cancelled_caught, now_ns(rank)

    assert simulate(main, 8, algorithm="ring")[0] == [(True, False, 264 * MS)] * 8


def test_roofline():
    async def main(rank):
        await rank.compute(lambda: None, flops=1e9)
        await rank.compute(lambda: None, flops=1e6, bytes_moved=1e28)
        return now_ns(rank)

    assert simulate(main, 1)[0] == [1000 * MS + 10 * MS]
    assert simulate(main, 1, dtype="float32", efficiency=0.5)[0] == [20_000 * MS + 20 * MS]


def test_steps_are_marked():
    async def main(rank):
        for step in range(2):
            with rank.step(step):
                await rank.compute(lambda: None, seconds=0.003)

    _, timeline = simulate(main, 1)
    assert [(span.step, span.start_ns, span.end_ns) for span in timeline.spans if span.kind == "step"] == [
        (0, 0, 3 * MS), (1, 3 * MS, 6 * MS),
    ]  # fmt: skip
    assert timeline.clock == "virtual"


@pytest.mark.slow
def test_a_whole_machine_of_many_nodes():
    async def main(rank):
        return int((await rank.all_reduce(np.array([rank.rank])))[0])

    results = overlap.run(main, clock="virtual", cluster="trn2.48xlarge x4")
    assert results == [256 * 255 // 2] * 256


def test_advice_is_given_once_whatever_groups_it_concerns():
    async def main(rank):
        grid = rank.mesh(dp=8, tp=8)
        await grid["dp"].all_reduce(rank.empty(10))

    with pytest.warns(topology.TopologyWarning, match="rule trn2-peers-lnc2") as caught:
        simulate(main, 64, cluster="trn2.48xlarge", shapes_only=True)
    assert len(caught) == 1


def test_a_message_to_oneself():
    async def main(rank):
        sent, out = rank.send(np.arange(KB, dtype=np.uint8), rank.rank), np.zeros(KB, np.uint8)
        await rank.recv(out, rank.rank)
        await sent
        return out[-1], now_ns(rank)

    assert simulate(main, 2)[0] == [(np.uint8((KB - 1) % 256), 0)] * 2
