"""Tensors of torch on the CPU: read and written in place, in every dtype; what is changed too early is noticed."""

from collections.abc import Callable

import numpy as np
import pytest

import overlap
from overlap import UsageError
from overlap.runtime.memory.foreign import as_input_array, as_output_array
from tests.errors import error_from

from .worlds import run

torch = pytest.importorskip("torch", reason="whoever has tensors has torch")

DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int64", "uint8", "bool"]


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype(path: str, name: str) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        kind = getattr(torch, name)
        x, out = torch.tensor([1, 0, 1]).to(kind), torch.zeros(3).to(kind)
        result = await rank.all_reduce(x, op="max", out=out)
        gathered = await rank.all_gather(x)
        in_place = await rank.all_reduce(x, op="max", out=x)
        return [
            result is out,
            out.to(torch.float32).tolist(),
            gathered.dtype.name,
            gathered.astype(np.float32).tolist(),
            in_place is x,
        ]

    expected = [True, [1.0, 0.0, 1.0], name, [1.0, 0.0, 1.0] * 2, True]
    assert run(main, 2, path=path) == [expected] * 2


def test_tensors_that_are_views() -> None:
    async def main(rank: overlap.Rank) -> tuple[object, object]:
        x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
        out = torch.zeros(9, dtype=torch.bfloat16)
        await rank.all_reduce(x.T, out=out[3:].view(3, 2))
        return out.tolist(), float(torch.zeros((), dtype=torch.bfloat16) + 1)

    assert run(main, 2) == [([0.0] * 3 + [0.0, 6.0, 2.0, 8.0, 4.0, 10.0], 1.0)] * 2


def test_a_tensor_that_is_changed_too_early() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        told = []
        for other in ("itself", "a view of it"):
            x = torch.ones(4)
            future = rank.send(x, 0, name="grads")
            (x if other == "itself" else x[1:2]).add_(1)
            rank.recv(((4,), np.float32), 0)
            told.append(str(await error_from(UsageError, future)))
        return told

    for message in run(main, 1)[0]:
        assert message.startswith("x: was changed while grads #")
        assert message.endswith("was reading it; await that first")


def test_a_tensor_that_is_changed_afterwards() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        x = torch.ones(2)
        for _ in range(3):
            await rank.all_reduce(x, out=x)
            x.mul_(2)
        with torch.inference_mode():  # such tensors do not count their changes
            uncounted = torch.ones(2)
        await rank.all_reduce(uncounted)
        return x.tolist()

    assert run(main, 2) == [[64.0, 64.0]] * 2


def test_a_future_of_a_tensor() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        out = torch.zeros(2, dtype=torch.bfloat16)
        made = rank.compute(lambda: torch.ones(2, dtype=torch.bfloat16))
        assert await rank.all_reduce(made, out=out) is out
        return out.tolist()

    assert run(main, 2) == [[2.0, 2.0]] * 2


TENSORS: list[tuple[Callable[[], object], str]] = [
    (lambda: torch.ones(2, requires_grad=True), r"gradients do not flow through collectives; pass \.detach\(\)"),
    (lambda: torch.nn.Parameter(torch.ones(2)), r"Parameter: gradients do not flow"),
    (lambda: torch.ones(2, device="meta"), r"it is on meta; pass a tensor on the CPU, such as \.cpu\(\)$"),
    (lambda: torch.ones(2).to_sparse(), r"it is torch\.sparse_coo; pass \.to_dense\(\)$"),
    (lambda: torch.ones(2, dtype=torch.complex64).conj(), r"lazy conjugate or negative; pass \.resolve_conj"),
]


@pytest.mark.parametrize(("make", "message"), TENSORS)
def test_tensors_whose_memory_is_out_of_reach(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match="^x: cannot use the memory of this .*" + message):
        as_input_array(make())
    with pytest.raises(UsageError, match="^out: cannot use the memory of this .*" + message):
        as_output_array(make(), "out")
