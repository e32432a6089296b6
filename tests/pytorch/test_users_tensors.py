"""Tensors of users: after every operation as usable as before, and freed while operations wait."""

import gc
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402

import overlap  # noqa: E402
from overlap.runtime.calls.collectives import CollectiveCalls  # noqa: E402
from overlap.runtime.calls.exchanges import Exchanges  # noqa: E402
from overlap.runtime.calls.objects import Objects  # noqa: E402
from overlap.torch import ProcessGroup  # noqa: E402
from overlap.torch.reductions import Reductions as TorchReductions  # noqa: E402
from overlap.torch.tensors import as_array  # noqa: E402
from overlap.torch.transfers import Transfers  # noqa: E402

from .pairs import connected, do  # noqa: E402

# -- A tensor can do after every operation what it could do before: no operation changes more than elements ------------

Make = Callable[..., Any]
"""Makes a tensor of a shape, which is looked at when the operation has ended."""


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[overlap.Connection]]:
    with connected(2, dist.HashStore()) as two:
        for world in two:
            world.rank.compute(lambda: None).result()  # the thread of its computes lives as long as it
        yield two


def freedom(tensor: Any) -> tuple[object, ...]:
    """Return what a tensor can do, after its storage was resized, and is what it was before."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)  # raises where something has fixed its size
    storage.resize_(nbytes)
    with torch.no_grad():
        tensor.zero_()
    return (
        nbytes,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_leaf,
        type(tensor),
        tensor.data_ptr() != 0,
    )


def check(operation: Callable[..., object], on: object, make: Make) -> None:
    """Run an operation, and compare what its tensors can do with what they could do."""
    made: list[tuple[Any, tuple[object, ...]]] = []

    def tracked(*shape: int) -> Any:
        tensor = make(*shape)
        before = freedom(tensor)
        with torch.no_grad():
            tensor.fill_(1)
        made.append((tensor, before))
        return tensor

    operation(on, tracked)
    assert made
    for tensor, before in made:
        assert freedom(tensor) == before


def both(worlds: list[overlap.Connection], function: Callable[[overlap.Connection], object]) -> None:
    for error in do([partial(function, world) for world in worlds]):
        if isinstance(error, BaseException):
            raise error


TENSORS: dict[str, Make] = {
    "float32": lambda *shape: torch.ones(shape),
    "bfloat16": lambda *shape: torch.ones(shape, dtype=torch.bfloat16),
    "float8": lambda *shape: torch.ones(shape).to(torch.float8_e5m2),
    "part of a storage": lambda *shape: torch.ones(2 * int(np.prod(shape)))[: int(np.prod(shape))].view(shape),
    "apart": lambda *shape: torch.ones(*shape, 2)[..., 0],
    "gradients": lambda *shape: torch.ones(shape, requires_grad=True),
    "parameter": lambda *shape: torch.nn.Parameter(torch.ones(shape)),
    "empty": lambda *shape: torch.ones(*shape, 0),
}

# By methods of the process group, on two ranks.
GROUP: dict[str, Callable[[ProcessGroup, Make], object]] = {
    "allreduce": lambda group, new: group.allreduce([new(4)]).wait(),
    "allreduce_coalesced": lambda group, new: group.allreduce_coalesced([new(4), new(2)]).wait(),
    "reduce": lambda group, new: group.reduce([new(4)]).wait(),
    "reduce_scatter": lambda group, new: group.reduce_scatter([new(2)], [[new(2), new(2)]]).wait(),
    "reduce_scatter_single": lambda group, new: group.reduce_scatter_single(new(2), new(4)).wait(),
    "reduce_scatter_single_coalesced": lambda group, new: group.reduce_scatter_single_coalesced(
        [new(2), new(1)], [new(4), new(2)]
    ).wait(),
    "broadcast": lambda group, new: group.broadcast([new(4)]).wait(),
    "allgather": lambda group, new: group.allgather([[new(2), new(2)]], [new(2)]).wait(),
    "allgather_coalesced": lambda group, new: group.allgather_coalesced([[new(2)], [new(2)]], [new(2)]).wait(),
    "all_gather_single": lambda group, new: group.all_gather_single(new(4), new(2)).wait(),
    "all_gather_single_coalesced": lambda group, new: group.all_gather_single_coalesced(
        [new(4), new(2)], [new(2), new(1)]
    ).wait(),
    "gather": lambda group, new: group.gather([[new(2), new(2)]] if group.rank() == 0 else [], [new(2)]).wait(),
    "scatter": lambda group, new: group.scatter([new(2)], [[new(2), new(2)]] if group.rank() == 0 else []).wait(),
    "all_to_all_single": lambda group, new: group.all_to_all_single(new(4), new(4), [], []).wait(),
    "alltoall": lambda group, new: group.alltoall([new(2), new(2)], [new(2), new(2)]).wait(),
    "send": lambda group, new: (group.recv if group.rank() else group.send)([new(4)], 1 - group.rank(), 1).wait(),
    "recv": lambda group, new: (group.send if group.rank() else group.recv)([new(4)], 1 - group.rank(), 2).wait(),
    "recv_anysource": lambda group, new: (
        group.send([new(4)], 0, 3) if group.rank() else group.recv_anysource([new(4)], 3)
    ).wait(),
}


def test_every_operation_of_process_groups_is_here() -> None:
    methods = {**vars(TorchReductions), **vars(Transfers)}  # some under a second name
    assert {method.__name__ for name, method in methods.items() if not name.startswith("_")} == set(GROUP)


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", GROUP)
def test_operations_of_process_groups(worlds: list[overlap.Connection], name: str, kind: str) -> None:
    def call(world: overlap.Connection) -> None:
        group = ProcessGroup(dist.HashStore(), world.rank.world, timedelta(seconds=30))
        check(GROUP[name], group, TENSORS[kind])

    both(worlds, call)


def _message(rank: overlap.Rank, new: Make) -> None:
    sent = rank.send(new(4), 1 - rank.rank)
    rank.recv(new(4), 1 - rank.rank).result()
    sent.result()


def _any_message(rank: overlap.Rank, new: Make) -> None:
    sent = rank.send({"w": new(4), "b": [new(2)]}, 1 - rank.rank)
    rank.recv({"w": new(4), "b": [new(2)]}, 1 - rank.rank).result()
    sent.result()


RANK: dict[str, Callable[[overlap.Rank, Make], object]] = {
    "all_reduce": lambda rank, new: rank.all_reduce(new(4), out=new(4)).result(),
    "all_reduce in place": lambda rank, new: rank.all_reduce(x := new(4), out=x).result(),
    "all_reduce of a tree": lambda rank, new: rank.all_reduce({"w": new(4), "b": [new(2)]}).result(),
    "all_reduce of a future": lambda rank, new: rank.all_reduce(rank.compute(new, 4)).result(),
    "compute": lambda rank, new: rank.compute(lambda x: None, new(4)).result(),
    "reduce": lambda rank, new: rank.reduce(new(4), out=None if rank.rank else new(4)).result(),
    "reduce_scatter": lambda rank, new: rank.reduce_scatter(new(4), out=new(2)).result(),
    "all_gather": lambda rank, new: rank.all_gather(new(2), out=new(4)).result(),
    "gather": lambda rank, new: rank.gather(new(2), out=None if rank.rank else new(4)).result(),
    "broadcast": lambda rank, new: rank.broadcast(new(4), out=new(4)).result(),
    "scatter": lambda rank, new: rank.scatter(new(4), out=new(2)).result(),
    "all_to_all": lambda rank, new: rank.all_to_all(new(4), out=new(4)).result(),
    "permute": lambda rank, new: rank.permute(new(4), [(0, 1), (1, 0)], out=new(4)).result(),
    "send and recv": _message,
    "send and recv of a tree": _any_message,
    "all_gather_object": lambda rank, new: rank.all_gather_object({"w": new(4)}).result(),
    # torch itself cannot pickle float8
    "all_gather_object, pickled": lambda rank, new: rank.all_gather_object(new(4).float(), pickle=True).result(),
    "gather_object": lambda rank, new: rank.gather_object([new(4)]).result(),
    "broadcast_object": lambda rank, new: rank.broadcast_object(new(4)).result(),
    "scatter_object": lambda rank, new: rank.scatter_object([new(4), new(2)]).result(),
}


def test_every_operation_of_ranks_is_here() -> None:
    rooms = (CollectiveCalls, Exchanges, Objects)
    methods = {name for room in rooms for name, _ in inspect.getmembers(room, inspect.isfunction)}
    words = {word for name in RANK for word in name.replace(",", "").split()}
    assert {name for name in methods if not name.startswith("_")} - words == {"barrier"}


@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind not in ("gradients", "parameter", "apart", "empty")])
@pytest.mark.parametrize("name", RANK)
def test_operations_of_ranks(worlds: list[overlap.Connection], name: str, kind: str) -> None:
    both(worlds, lambda world: check(RANK[name], world.rank, TENSORS[kind]))


def test_the_array_is_the_memory_of_the_storage_that_the_tensor_had() -> None:
    x = torch.arange(4.0)
    array = as_array(x)
    x.data = torch.zeros(4)  # frees the storage, unless the array refers to it
    del x
    torch.full((4,), 9.0)
    assert array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize(
    "take",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1, 2],
        lambda x: x[:, 1:3],
        lambda x: x[:0],
        lambda x: x[0].expand(5, 4),
        lambda x: x.as_subclass(type("Other", (torch.Tensor,), {})),
    ],
)
def test_views_have_the_elements_of_their_tensors(dtype: Any, take: Callable[[Any], Any]) -> None:
    tensor = take(torch.arange(12).reshape(3, 4).to(dtype))
    array = as_array(tensor)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.shape == tensor.shape
    assert array.flags.writeable
    assert array.tolist() == tensor.tolist()
    array[...] = 0
    assert not tensor.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "it is a lazy conjugate or negative"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "it is a lazy conjugate or negative"),
        (lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8), r"numpy has no dtype for torch\.bits8"),
        (lambda: _freed(torch.ones(2)), "it has no memory of its own: its storage was freed, or it wraps"),
        (lambda: torch._efficientzerotensor((2,)), "it has no memory of its own: its storage was freed, or it wraps"),
    ],
)
def test_tensors_without_memory_of_numbers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        as_array(make())
    assert type(caught.value).__name__ == "CallError"


def _freed(tensor: Any) -> Any:
    tensor.untyped_storage().resize_(0)
    return tensor


# -- tensors that a program frees while their operations wait for other ranks ------------------------------------------


@pytest.mark.parametrize("elements", [1, 1_000, 20_000, 2_000_000])
def test_an_operation_keeps_its_tensor(elements: int) -> None:
    """Small inputs are copied at the call; large ones are read where they lie."""
    count = 8
    with connected(2, dist.HashStore()) as worlds:
        groups = [ProcessGroup(dist.HashStore(), world.rank.world, timedelta(seconds=30)) for world in worlds]
        first = [group.allreduce([torch.ones(1)]) for group in groups]
        assert all(work.wait() for work in first)  # they have met: from now on the engine begins at the call
        for number in range(count):
            groups[0].allreduce([torch.full((elements,), float(number))])
        gc.collect()
        others = [torch.full((elements,), -1.0) for _ in range(2 * count)]  # where those were, unless they are kept
        got = [torch.full((elements,), 100.0) for _ in range(count)]
        works = [groups[1].allreduce([x]) for x in got]
        assert all(work.wait() for work in works)
        assert [sorted(set(x.tolist())) for x in got] == [[100.0 + number] for number in range(count)]
        assert all((other == -1).all() for other in others)
