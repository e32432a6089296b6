"""Memory of receives that are more than an array, and the ends of messages over a wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import trio

from transports import Buffer, LengthMismatchError, Request, SignatureMismatchError, TransportError

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import Array
from ..errors import UsageError, shown
from .context import Arrays
from .engine.host_bytes import bytes_of
from .failure import Failure
from .forms import Absent, parse_form, text_of
from .match import mismatch
from .memory.foreign import as_output
from .signature import parse
from .state import DONE
from .trees import fill_tree, leaves_of, make_message, map_items, packed_type, read_message, unpacker_of

if TYPE_CHECKING:
    from .message import Message
    from .operation import CollectiveFuture

MESSAGE_ALGORITHM: Final = "mesh"
"""Name of a message over a wire in timelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveBuffers:
    """Arrays that a receive fills, for all but a single array."""

    tree: object = None  # The caller's tree, with an array for each (shape, dtype); None: the sender's tree
    leaves: Sequence[object] = ()  # Leaves of the tree
    arrays: Sequence[Array] = ()  # Memory of each leaf
    views: Sequence[Array] = ()  # Views of that memory, which stay writable
    message: Array | None = None  # Memory of the arriving message, which begins with the form
    packed: Array | None = None  # Its part for the arrays
    call: Call  # Call of the receiver


ANY_TREE = ReceiveBuffers(call=call(P2P.text, None, None, None, 2))
"""Buffers of a receive that accepts any array or tree."""


def buffers_for(like: object, arrays: Arrays) -> ReceiveBuffers:
    """Return the buffers of a tree of writable arrays, or of (shape, dtype) for new ones.

    Raises:
        UsageError: If a leaf has no memory that may be written, or the tree is too large for one message.
    """
    tree = _with_arrays(like, arrays)
    leaves = leaves_of(tree)
    if not leaves:
        raise UsageError("like: there is no array in it; expected an array, or lists and dicts of arrays")
    memory = [as_output(leaf, "like") if not arrays.shapes_only else cast(Array, leaf) for leaf in leaves]
    form = text_of(tree, memory, "like")
    message, packed = make_message(form, memory, arrays)
    return ReceiveBuffers(
        tree=tree,
        leaves=leaves,
        arrays=memory,
        views=[leaf.view() for leaf in memory],
        message=message,
        packed=packed,
        call=_call_of(packed.dtype, packed.size, form),
    )


def _call_of(dtype: np.dtype[np.generic], elements: int, form: str) -> Call:
    """Return the call of a message of a tree."""
    return call(P2P.text, None, dtype, (elements,), 2, 0, (), (), False, False, None, form)


def new_array(pair: tuple[Any, Any], arrays: Arrays) -> Array:
    """Return a new array of a (shape, dtype).

    Raises:
        TypeError: If such an array is impossible; or `ValueError`.
    """
    shape, dtype = pair
    return arrays.empty(tuple(map(index, (shape,) if isinstance(shape, int) else shape)), np.dtype(dtype))


def _with_arrays(like: object, arrays: Arrays) -> object:
    """Return a tree with a new array in place of each (shape, dtype)."""
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], (str, type, np.dtype)):
        try:
            return new_array(like, arrays)
        except (TypeError, ValueError) as error:
            raise UsageError(f"like: expected an array or (shape, dtype), got {shown(like)}: {error}") from error
    return map_items(like, lambda item: _with_arrays(item, arrays))


def read_tree(message: Array) -> tuple[Call, Array]:
    """Return the call of an arrived message of a tree, and its packed arrays.

    Raises:
        OverlapError: If it does not begin with the form of a tree.
        ValueError: If its arrays are not those of the form.
    """
    form, data = read_message(message)
    dtype, elements = packed_type(cast("list[Absent]", leaves_of(parse_form(form))))
    return _call_of(dtype, elements, form), data.view(dtype).reshape(elements)


def unpack(buffers: ReceiveBuffers, form: str, packed: Array | None, arrays: Arrays) -> object:
    """Return the tree of arrived bytes, in the arrays of `like` if there is one."""
    tree = unpacker_of(parse_form(form), P2P, 2, arrays)([packed])
    if buffers.tree is None:  # arrays of their own
        return tree if arrays.shapes_only else fill_tree(tree, [np.array(leaf) for leaf in leaves_of(tree)])
    if not arrays.shapes_only:
        for view, part in zip(buffers.views, cast("list[Array]", leaves_of(tree)), strict=True):
            view[...] = part
    return fill_tree(buffers.tree, buffers.leaves)


def allocate(message: Message[Any], request: Request) -> Buffer:
    """Return the place of a message whose sender alone knows its shape, or its tree."""
    assert request.theirs is not None
    theirs = parse(request.theirs.text, request.theirs.fingerprint)
    if theirs.call is not None and not theirs.is_tree:
        message.fit(theirs.call)
        return bytes_of(cast("Array", message.target).reshape(-1))
    if not theirs.is_tree:
        raise UsageError(
            f"recv: the array that {theirs.site} sends has too many dimensions to come with its shape; "
            "pass like=(shape, dtype)"
        )
    message.tree_memory = message.context.arrays.empty((request.nbytes,), np.dtype(np.uint8))
    return message.tree_memory


def request_ended(message: Message[Any], request: Request) -> None:
    """End the message with the end of its transfer."""
    operation: CollectiveFuture[Any] = message  # which declares some
    message.request = operation.poll = None
    error = request.error
    if message.receives and message.tree_memory is not None and error is None and not request.withdrawn:
        try:
            message.pattern, operation.out = read_tree(message.tree_memory)
        except Exception as invalid:
            error = invalid
    if request.withdrawn:
        if message.on_withdrawn is not None:
            message.on_withdrawn()
    elif error is not None:
        _wire_failed(message, request, error)
    else:
        message.stopped()
        if message.state < DONE:
            sent = message.pattern or message.call
            message.finish(message.context.now_ns(), message.describe(sent, message.started_ns))
    if message.over is not None and message.request is None:
        message.over.set()


def _wire_failed(message: Message[Any], request: Request, error: Exception) -> None:
    """Fail the message: the ends differ, or the wire is broken."""
    theirs = request.theirs
    message.stopped()
    if message.state >= DONE:
        return
    if theirs is None or not isinstance(error, (SignatureMismatchError, LengthMismatchError)):
        if isinstance(error, TransportError):
            error.operation = f"{message.label} ({message.call_site})"
        message.inbox.fail_broken_wire(message, error)
        return
    other = parse(theirs.text, theirs.fingerprint)
    own, peer = message.context.rank, message.members[not message.receives]
    ends = (own, message.call, message.call_site), (peer, other.what, other.site)
    sent, received = reversed(ends) if message.receives else ends
    message.fail(Failure(mismatch(message.member.name, message.seq, sent, received)()))


def withdraw(message: Message[Any], later: Callable[[], None]) -> bool:
    """Withdraw the transfer of a receive; see `Inbox.withdraw_receive`."""
    request = message.request
    if request is None:
        return False
    message.on_withdrawn = None
    request.withdraw()
    if request.ended:
        return request.withdrawn
    message.on_withdrawn = later
    return False


async def give_up(message: Message[Any]) -> None:
    """Withdraw the transfer, or wait for its end, because it uses the caller's memory."""
    with trio.CancelScope(shield=True):
        await trio.lowlevel.checkpoint()  # a callback of a transport may not call it back
        if message.request is not None:
            message.over, message.on_withdrawn = trio.Event(), message.stopped
            message.request.withdraw()
            if message.request is not None and message.request.ended:  # an interrupt has left its end half done
                request_ended(message, message.request)
            elif message.request is not None:
                await message.over.wait()
