"""Memory for receives of trees and of unknown shape, and the end of a message's transfer over a wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import trio

from transports import Buffer, LengthMismatchError, Request, SignatureMismatchError

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import Array
from ..errors import UsageError, argument_text
from .context import Arrays
from .engine.host_bytes import bytes_of
from .failure import Failure
from .forms import ArrayPlaceholder, parse_form, sendable_form
from .match import mismatch_error_maker
from .memory.foreign import as_output_array
from .signature import parse_signature
from .state import DONE
from .trees import (
    leaves_of,
    make_message_buffer,
    map_items,
    packed_dtype_and_size,
    replace_leaves,
    split_tree_message,
    unpacker_of,
)

if TYPE_CHECKING:
    from .message import Message

MESSAGE_ALGORITHM: Final = "mesh"
"""Name of a message over a wire in timelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveBuffers:
    """Memory of a receive whose `like` is a tree or None; a receive into one array needs none of this."""

    tree: object = None  # The caller's tree, with an array for each (shape, dtype); None: the sender's tree
    leaves: Sequence[object] = ()  # The caller's leaves of the tree: arrays, or other objects with memory
    arrays: Sequence[Array] = ()  # The array behind each leaf
    views: Sequence[Array] = ()  # Views of these arrays that stay writable while the arrays are locked
    message: Array | None = None  # Buffer for the whole message: the form of the tree, then the packed arrays
    packed: Array | None = None  # The part of `message` that the packed arrays fill
    call: Call  # Call of the receiver


ANY_TREE = ReceiveBuffers(call=call(P2P.text, None, None, None, 2))
"""Buffers of a receive that accepts any array or tree."""


def make_receive_buffers(like: object, arrays: Arrays) -> ReceiveBuffers:
    """Return the buffers for a receive into a tree.

    Args:
        like: The tree. A leaf is a writable array, or a pair (shape, dtype), for which a new array is made.
        arrays: Makes new arrays.

    Raises:
        UsageError: If a leaf has no memory that may be written, or the tree is too large for one message.
    """
    tree = _tree_with_arrays(like, arrays)
    leaves = leaves_of(tree)
    if not leaves:
        raise UsageError("like: there is no array in it; expected an array, or lists and dicts of arrays")
    memory = [as_output_array(leaf, "like") if not arrays.shapes_only else cast(Array, leaf) for leaf in leaves]
    form = sendable_form(tree, memory, "like")
    message, packed = make_message_buffer(form, memory, arrays)
    return ReceiveBuffers(
        tree=tree,
        leaves=leaves,
        arrays=memory,
        views=[leaf.view() for leaf in memory],
        message=message,
        packed=packed,
        call=_tree_call(packed.dtype, packed.size, form),
    )


def _tree_call(dtype: np.dtype[np.generic], elements: int, form: str) -> Call:
    """Return the call of a message whose packed arrays have this dtype and number of elements."""
    # two ends; no operator, root, pairs, counts, exact, shared and algorithm
    return call(P2P.text, None, dtype, (elements,), 2, 0, (), (), False, False, None, form)


def new_array(pair: tuple[Any, Any], arrays: Arrays) -> Array:
    """Return a new array for a pair (shape, dtype).

    Raises:
        TypeError: If the first item is no shape, or the second no dtype.
        ValueError: If `pair` does not have two items, or no array can have that shape.
    """
    shape, dtype = pair
    return arrays.empty(tuple(map(index, (shape,) if isinstance(shape, int) else shape)), np.dtype(dtype))


def _tree_with_arrays(like: object, arrays: Arrays) -> object:
    """Return the tree `like` with a new array in place of each pair (shape, dtype)."""
    if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], (str, type, np.dtype)):
        try:
            return new_array(like, arrays)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"like: expected an array or (shape, dtype), got {argument_text(like)}: {error}"
            ) from error
    return map_items(like, lambda item: _tree_with_arrays(item, arrays))


def read_tree_message(message: Array) -> tuple[Call, Array]:
    """Split an arrived message: return the sender's call, and the packed arrays of the tree as one array.

    Raises:
        OverlapError: If the message does not begin with the form of a tree.
        ValueError: If the bytes after the form are not as many as its arrays have.
    """
    form, data = split_tree_message(message)
    dtype, elements = packed_dtype_and_size(cast("list[ArrayPlaceholder]", leaves_of(parse_form(form))))
    return _tree_call(dtype, elements, form), data.view(dtype).reshape(elements)


def unpack_received_tree(buffers: ReceiveBuffers, form: str, packed: Array | None, arrays: Arrays) -> object:
    """Return the received tree: with the caller's arrays, now filled, or with new arrays if the caller gave none.

    Args:
        buffers: Buffers of the receive.
        form: Form of the sender's tree: its dicts, lists and tuples as text.
        packed: The arrays that have arrived, packed into one.
        arrays: Makes new arrays.

    Raises:
        OverlapError: If the form is invalid.
    """
    tree = unpacker_of(parse_form(form), P2P, 2, arrays)([packed])
    if buffers.tree is None:  # copies: `packed` is memory of the message
        return tree if arrays.shapes_only else replace_leaves(tree, [np.array(leaf) for leaf in leaves_of(tree)])
    if not arrays.shapes_only:
        for view, part in zip(buffers.views, cast("list[Array]", leaves_of(tree)), strict=True):
            view[...] = part
    return replace_leaves(buffers.tree, buffers.leaves)


def allocate_receive_memory(receive: Message[Any], request: Request) -> Buffer:
    """Make the memory of a receive without `like`, now that it has met its message, and return it as bytes.

    The memory becomes the receive's `target` if the message is an array, and its `tree_memory` if it is a tree.

    Args:
        receive: The receive.
        request: Transfer of the receive, with the signature and the length of the message.

    Raises:
        UsageError: If the message is an array, and its signature had no room for the shape.
    """
    assert request.theirs is not None
    theirs = parse_signature(request.theirs.text, request.theirs.fingerprint)
    # a tree: bytes for the whole message, which begins with the form of the tree
    if theirs.is_tree:
        receive.tree_memory = receive.context.arrays.empty((request.nbytes,), np.dtype(np.uint8))
        return receive.tree_memory
    # an array whose shape was too long for the signature
    if theirs.call is None:
        raise UsageError(
            f"recv: the array that {theirs.site} sends has too many dimensions to come with its shape; "
            "pass like=(shape, dtype)"
        )
    # an array whose dtype and shape are in the signature
    receive.prepare_result(theirs.call)
    return bytes_of(cast("Array", receive.target).reshape(-1))


def end_message(message: Message[Any], request: Request) -> None:
    """End a message after its transfer has ended: with the result, with an error, or as withdrawn.

    Only the loop's thread, or a thread in its place, may call this.
    """
    message.request = message.poll = None
    error = request.error
    if message.receives and message.tree_memory is not None and error is None and not request.withdrawn:
        try:
            message.pattern, message.out = read_tree_message(message.tree_memory)
        except Exception as invalid:
            error = invalid
    if request.withdrawn:
        if message.on_withdrawn is not None:
            message.on_withdrawn()
    elif error is not None:
        _fail_by_wire_error(message, request, error)
    else:
        message.on_bytes_stopped()
        if message.state < DONE:
            sent = message.pattern or message.call
            message.finish(message.context.now_ns(), message.describe_meeting(sent, message.started_ns))
    # `stop_transfer` waits, unless the message was issued again
    if message.transfer_over is not None and message.request is None:
        message.transfer_over.set()


def _fail_by_wire_error(message: Message[Any], request: Request, error: Exception) -> None:
    """Fail a message, unless it has ended: both ends issued different calls, or the wire is broken.

    Once send and receive have met, `request` has the peer's signature.
    """
    theirs = request.theirs
    message.on_bytes_stopped()
    if message.state >= DONE:
        return
    if theirs is None or not isinstance(error, (SignatureMismatchError, LengthMismatchError)):
        message.inbox.fail_broken_wire(message, error)
        return
    other = parse_signature(theirs.text, theirs.fingerprint)
    own, peer = message.context.rank, message.peer_rank
    ends = (own, message.call, message.call_site), (peer, other.what, other.site)
    sent, received = reversed(ends) if message.receives else ends  # the sender comes first in the error, on both ends
    message.fail(Failure(mismatch_error_maker(message.member.name, message.seq, sent, received)()))


def withdraw_transfer(message: Message[Any], later: Callable[[], None]) -> bool | None:
    """Withdraw the transfer of a receive, so that the wire gives its message to another receive.

    Args:
        message: The receive.
        later: Called if the transfer is withdrawn only after this function has returned.

    Returns:
        True: the transfer is withdrawn. False: it has met its message, or there is no transfer. None: the wire decides
        later, and then calls `later` if the transfer is withdrawn.
    """
    request = message.request
    if request is None:
        return False
    message.on_withdrawn = None
    request.withdraw()
    if request.ended:
        return request.withdrawn
    message.on_withdrawn = later
    return False if request.matched else None


async def stop_transfer(message: Message[Any]) -> None:
    """Stop the transfer of a message, and wait for its end, because it uses memory of the caller until then.

    A cancellation does not interrupt the wait. `message.on_bytes_stopped` has been called when this returns.
    """
    with trio.CancelScope(shield=True):
        await trio.lowlevel.checkpoint()  # a callback of a transport may not call it back; the transfer may end here
        if message.request is None:
            return
        message.transfer_over, message.on_withdrawn = trio.Event(), message.on_bytes_stopped
        message.request.withdraw()
        # If that has ended the transfer at once, `end_message` was called, and there is no request any more.
        if message.request is not None and message.request.ended:  # an interrupt has left its end half done
            end_message(message, message.request)
        elif message.request is not None:
            await message.transfer_over.wait()
