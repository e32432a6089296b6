"""The contract's own parts: flat views of buffers, deliveries, errors, names."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from transports import (
    ArgumentError,
    Delivery,
    LengthMismatchError,
    LinkLostError,
    NeuronLink,
    Request,
    TransportError,
)
from transports.buffers import Buffer, as_bytes
from transports.wire import describe_ranks
from transports.wrappers import WrappedWire


@pytest.mark.parametrize(
    "data",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array([1 + 2j]),
        np.array(3.0),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array([1, 2], ">i4"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_every_dtype_are_viewed_without_a_copy(data: npt.NDArray[np.generic]) -> None:
    view = as_bytes(data, writable=True)
    assert (view.format, view.ndim, bytes(view)) == ("B", 1, data.tobytes())
    view[:] = bytes(view.nbytes)
    assert data.tobytes() == bytes(data.nbytes)


@pytest.mark.parametrize("data", [b"", np.zeros((0, 3)), np.zeros((2, 0), np.uint8)], ids=type)
def test_empty_buffers_become_empty_bytes(data: Buffer) -> None:
    view = as_bytes(data)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, 0)


def test_bad_buffers_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^out is read-only; receive into memory that may be written$"):
        as_bytes(b"x", name="out", writable=True)
    with pytest.raises(ArgumentError, match=r"\(shape \(2,\), strides \(16,\)\); copy it first$"):
        as_bytes(np.zeros(4)[::2])
    with pytest.raises(ArgumentError, match=r"^out is read-only"):
        as_bytes(memoryview(b""), name="out", writable=True)
    frozen = np.zeros((2, 0), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"^out is read-only"):
        as_bytes(frozen, name="out", writable=True)
    with pytest.raises(ArgumentError, match=r"^data cannot be taken as bytes: not C-contiguous \(shape \(4, 2\)"):
        as_bytes(np.zeros((4, 4), ml_dtypes.bfloat16)[:, ::2])
    with pytest.raises(ArgumentError, match=r"^data cannot be taken as bytes: not C-contiguous \(shape \(4, 2\)"):
        as_bytes(np.zeros((4, 4), np.uint8)[:, ::2])
    for odd in ("text", 7, None, np.array([object()])):
        with pytest.raises(ArgumentError, match=r"^data cannot be taken as bytes: "):
            as_bytes(odd)  # type: ignore[arg-type]


def test_a_delivery_is_released_once() -> None:
    released: list[str] = []
    delivery = Delivery(memoryview(b"12345"), lambda: released.append("released"))
    assert repr(delivery) == "<Delivery of 5 bytes>"
    with delivery:
        assert released == []
    delivery.release()
    assert (released, repr(delivery)) == (["released"], "<Delivery, released>")
    with pytest.raises(ValueError, match="released"):
        bytes(delivery.view)


def test_a_delivery_that_is_held_open_is_released_too() -> None:
    released: list[str] = []
    delivery = Delivery(memoryview(b"12345"), lambda: released.append("released"))
    holder = PickleBuffer(delivery.view)
    delivery.release()
    assert (released, holder.raw().nbytes) == (["released"], 5)


def test_errors_say_who_and_what() -> None:
    error = LengthMismatchError(sent_bytes=8, expected_bytes=4, src=0, dst=3, tag=17)
    assert str(error) == (
        "message from rank 0 to rank 3, tag 17: "
        "8 bytes were sent, 4 bytes were expected; both ends must name one length"
    )
    assert str(LinkLostError("gone", src=0, dst=3)) == "message from rank 0 to rank 3: gone"
    assert isinstance(error, TransportError)
    assert isinstance(ArgumentError("no"), ValueError)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "rank 0"), ((0, 1), "ranks 0, 1"), ((4, 5, 6), "ranks 4-6"), ((0, 2, 4), "ranks 0, 2, 4")],
)
def test_ranks_are_described_briefly(ranks: tuple[int, ...], text: str) -> None:
    assert describe_ranks(ranks) == text


async def test_a_wire_of_requests_alone_lends_memory_of_its_own() -> None:
    class OnlyCopies(WrappedWire):
        def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, **options: Any) -> Request:
            request = Request(options["done"], nbytes)
            request.loan = memoryview(bytearray([src, tag, 9]))
            request.end()
            request.end(ValueError("it has ended"))
            return request

    wire = OnlyCopies(NeuronLink(2).wire(1), [0, 1])
    with await wire.recv(0, 5, 3) as delivery:
        assert (bytes(delivery.view), delivery.view.readonly) == (bytes([0, 5, 9]), True)
    with pytest.raises(ArgumentError, match=r"^nbytes is -1; a message has 0 bytes or more$"):
        await wire.recv(0, 5, -1)
    assert repr(wire) == "<OnlyCopies of rank 1>"


async def test_leaving_open_closes() -> None:
    async with NeuronLink(2).open() as link:
        end = link.wire(0)
    with pytest.raises(TransportError, match="closed"):
        await end.send(1, 0, b"x")


def test_an_error_names_the_message_or_what_it_is_a_part_of() -> None:
    error = LinkLostError("the wire is cut", src=0, dst=1, tag=5)
    assert str(error) == "message from rank 0 to rank 1, tag 5: the wire is cut"
    error.operation = "all_reduce #3 on group 'world' (train.py:41)"
    assert str(error) == (
        "message from rank 0 to rank 1 of all_reduce #3 on group 'world' (train.py:41): the wire is cut"
    )
    assert str(LinkLostError("the wire is cut")) == "the wire is cut"
