"""A program of a user, in which a type checker knows the type of each result; it also runs.

`assert_type` is checked by type checkers only; the functions below compare the values with it as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import numpy as np

import overlap
from overlap import parallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

F32: NDArray[np.float32] = np.zeros(4, np.float32)
I64: NDArray[np.int64] = np.arange(4)


async def reductions(rank: overlap.Rank) -> None:
    mean = rank.all_reduce(F32, op="mean")
    assert_type(mean, "overlap.CollectiveFuture[NDArray[np.float32]]")
    assert_type(await mean, "NDArray[np.float32]")
    assert_type(await rank.reduce_scatter(F32, "max", priority=1), "NDArray[np.float32]")
    assert_type(await rank.reduce(F32, 0, "sum"), "NDArray[np.float32] | None")
    assert (await mean).dtype == np.float32
    of_user: str = "sum"
    assert_type(await rank.all_reduce(F32, of_user), "NDArray[np.float32]")
    loss: float = float(await rank.all_reduce(1.5))
    assert loss == 1.5 * rank.world_size


async def copies(rank: overlap.Rank) -> None:
    assert_type(await rank.all_gather(I64.astype(np.int16), shared=True), "NDArray[np.int16]")
    assert_type(await rank.gather(F32), "NDArray[np.float32] | None")
    assert_type(await rank.broadcast(F32 if rank.rank == 0 else None), "NDArray[np.float32]")
    assert_type(await rank.scatter(F32, timeout_s=5), "NDArray[np.float32]")


async def exchanges(rank: overlap.Rank) -> None:
    assert_type(await rank.all_to_all(F32), "NDArray[np.float32]")
    assert_type(await rank.permute(F32, [(0, 1)]), "NDArray[np.float32]")
    assert_type(await rank.barrier(), None)
    after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    sent = rank.send(F32, after)
    got = rank.recv((4, np.float32), before)
    assert_type(await got, "NDArray[np.float32]")
    assert_type(await sent, None)
    sent = rank.send(bytearray(16), after, tag=1)
    buffer = bytearray(16)
    assert_type(await rank.recv(buffer, before, tag=1), bytearray)
    await sent
    sent = rank.send({"w": F32}, after)
    room = rank.recv({"w": F32.copy()}, before)
    assert_type(await room, "dict[str, NDArray[np.float32]]")
    assert room.src == before
    await sent
    sent = rank.send({"w": F32}, after)
    assert_type(await rank.recv({"w": (4, np.float32)}, before), "dict[str, NDArray[np.generic]]")
    await sent
    sent = rank.send(F32, after)
    assert np.array_equal(await rank.recv(src=before), F32)
    await sent


async def trees(rank: overlap.Rank) -> None:
    gradients = {"w": F32, "b": F32.copy()}
    mean = await rank.all_reduce(gradients, "mean")
    assert_type(mean, "dict[str, NDArray[np.float32]]")
    assert mean.keys() == gradients.keys()
    pair = await rank.broadcast((F32, I64))
    assert_type(pair, "tuple[NDArray[np.float32], NDArray[np.int64]]")
    assert [each.dtype for each in pair] == [np.float32, np.int64]
    assert_type(await rank.reduce([F32, F32]), "list[NDArray[np.float32]] | None")


def gradients_of(w: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    return {"w": w, "b": w[:1]}


async def trees_of_futures(rank: overlap.Rank) -> None:
    gradients = rank.compute(gradients_of, F32)
    mean = rank.all_reduce(gradients, "mean")
    assert_type(mean, "overlap.CollectiveFuture[dict[str, NDArray[np.float32]]]")
    assert_type(mean["w"], "overlap.Future[NDArray[np.float32]]")
    assert (await mean).keys() == {"w", "b"}
    named = await rank.all_reduce({"w": gradients["w"], "b": gradients["b"]})
    assert_type(named, "dict[str, NDArray[np.float32]]")
    assert named.keys() == {"w", "b"}
    assert_type(await rank.reduce(gradients), "dict[str, NDArray[np.float32]] | None")
    listed: Sequence[NDArray[np.float32]] = await rank.all_gather([gradients["w"], gradients["b"]])
    assert [each.shape for each in listed] == [(4 * rank.world_size,), (rank.world_size,)]
    pair = await rank.broadcast(rank.compute(lambda: (F32, I64), name="pair"))
    assert_type(pair, "tuple[NDArray[np.float32], NDArray[np.int64]]")


async def outputs(rank: overlap.Rank) -> None:
    out: NDArray[np.float32] = np.zeros(4, np.float32)
    assert_type(await rank.all_reduce(F32, out=out), "NDArray[np.float32]")
    memory = bytearray(4)
    found = await rank.all_reduce(bytearray(b"abcd"), "max", memory)
    assert_type(found, bytearray)
    assert found is memory
    assert memory == b"abcd"


def norm(x: NDArray[np.float32]) -> tuple[float, NDArray[np.float32]]:
    return float(np.sqrt((x * x).sum())), x


async def futures(rank: overlap.Rank) -> None:
    computed = rank.compute(norm, F32)
    assert_type(computed, "overlap.ComputeFuture[tuple[float, NDArray[np.float32]]]")
    assert_type(await computed[0], float)
    assert_type(await rank.all_reduce(computed[1]), "NDArray[np.float32]")  # a future of an array is as good as one
    assert_type(computed.result(), "tuple[float, NDArray[np.float32]]")
    assert_type(await rank.all_reduce(F32)[:2], "NDArray[np.float32]")

    async def later(text: str, times: int = 2) -> str:
        return text * times

    assert_type(await rank.spawn(later, "ab"), str)


async def objects(rank: overlap.Rank) -> None:
    assert_type(await rank.all_gather_object(rank.rank), "list[int]")
    assert_type(await rank.gather_object("text"), "list[str] | None")
    assert_type(await rank.broadcast_object({"lr": 0.1} if rank.rank == 0 else None), "dict[str, float]")
    assert_type(await rank.scatter_object([0.5] * rank.world_size), float)


async def groups(rank: overlap.Rank) -> None:
    half = await rank.split(rank.rank % 2)
    assert_type(half, "overlap.Group | None")
    if half is not None:
        assert_type(await half.all_reduce(F32), "NDArray[np.float32]")
    mesh = rank.mesh(dp=rank.world_size)
    assert_type(await mesh["dp"].all_gather(F32), "NDArray[np.float32]")


async def training(rank: overlap.Rank) -> None:
    params = {"w": F32}
    model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1))
    model.reduce("w", F32)
    await model.step()
    assert_type(await model.finish(), "dict[str, NDArray[np.float32]]")


async def main(rank: overlap.Rank, steps: int) -> dict[str, int]:
    for part in (reductions, copies, exchanges, trees, trees_of_futures, outputs, futures, objects, groups, training):
        await part(rank)
    return {"steps": steps}


def run() -> list[dict[str, int]]:
    results = overlap.run(main, 3, ranks=2)
    assert_type(results, "list[dict[str, int]]")
    return results
