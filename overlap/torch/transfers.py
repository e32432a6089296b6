"""Operations of a process group that move tensors without combining them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ..runtime.messages import MOST_TAGS
from . import private
from .errors import CallError
from .issuing import Issuing, Tensors, get_root, list_parts
from .operations import CallKey, c10d_operation, users_frame
from .tensors import (
    Array,
    as_array,
    check_memory,
    check_same_kind,
    check_same_shape,
    copy_flat_to_tensors,
    copy_to_each,
    flat_input,
    flat_output,
    is_plain,
    join_adjacent,
    list_tensors,
    one_tensor,
    share_storage,
)
from .work import Handle, JoinedOperations, Work

# Programs may use the tags below `_TAGS`; that tag itself is for all-to-all exchanges of unequal parts.
_TAGS = MOST_TAGS - 1
_ALL_TO_ALL_TAG = _TAGS
_FINISHED = JoinedOperations([])


class Transfers(Issuing):
    """broadcast, all_gather, gather, scatter, all_to_all, send and recv, in the forms that torch has of them.

    Arguments that several methods have:

    - `opts`: Options of c10d, with root, time limit, and whether the caller waits. It may also be the root itself, as a
      number, or a time limit. None: the defaults.
    - `timeout`: Time limit, which takes precedence over that of the options. None: that of the options, or the group's.
    - `root`: Root in the group, which takes precedence over that of the options. None: that of the options, or rank 0.

    Each method returns a `Work` at once, and raises `CallError` for arguments that do not fit.
    """

    @c10d_operation("broadcast_", "broadcast")
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        """Copy a tensor of the root to every rank.

        Args:
            tensors: The tensor, which is overwritten on other ranks than the root. Or a list of tensors of one shape:
                the options name the one that the root sends, and all tensors of all ranks get its elements.
            opts: This and the others: see `Transfers`.
        """
        inputs = list_tensors(tensors, "tensors")
        src, limit = get_root(opts, root, len(inputs)), self._time_limit_s(opts, timeout)
        if len(inputs) == 1:
            key = "broadcast", inputs[0].dtype, inputs[0].numel(), src
            x = inputs[0] if self._group.rank == src else None
            if timeout is None and (work := self._reissue_call(key, x, inputs[0], opts, inputs)) is not None:
                return work
            return Work(self._issue_broadcast(inputs[0], src, limit, key), inputs)
        check_same_kind(inputs, "tensors")
        check_same_shape(inputs, "tensors")
        check_memory(inputs)
        first = inputs[int(getattr(opts, "rootTensor", 0)) if self._group.rank == src else 0]
        handle = self._issue_broadcast(first, src, limit)
        return Work(JoinedOperations([handle], lambda: copy_to_each(first, inputs)), inputs)

    def _issue_broadcast(self, tensor: torch.Tensor, root: int, limit: float, key: CallKey | None = None) -> Handle:
        """Issue the broadcast of one tensor, which is read on the root, and written on the other ranks."""
        out, copy_back = flat_output(tensor)
        if self._group.rank == root:
            # Nothing is copied back on the root. If its input is a copy, the call is not kept.
            key, copy_back = key if copy_back is None else None, None
        return self._issue_operation(copy_back, "broadcast", out, root, out, limit=limit, key=key)

    @c10d_operation("allgather_", "all_gather")
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Copy the tensors of all ranks, which may differ in size, to every rank.

        A rank may pass several input tensors of one size. Then it passes an output list for each of them, and each of
        these lists gets all tensors of all ranks.

        Args:
            output_tensors: A list with a tensor for each rank, or a list that has only this list.
            input_tensors: This rank's tensor, or a list of tensors.
            opts: This and the others: see `Transfers`.
        """
        xs, limit = list_tensors(input_tensors, "input_tensors"), self._time_limit_s(opts, timeout)
        if len(xs) == 1:
            (x,) = xs
            key = "all_gather", x.dtype, x.numel(), x.dtype, x.numel() * self._group.size
            # only if the outputs follow each other in memory, the call can be issued again as an earlier one
            whole = self._join_adjacent_parts(output_tensors, x) if timeout is None else None
            parts = list_parts(output_tensors, "output_tensors")
            if whole is not None and (work := self._reissue_call(key, x, whole, opts, parts)) is not None:
                return work
            return Work(self._issue_all_gather(parts, x, limit, key), parts)
        lists = [list_tensors(parts, "output_tensors") for parts in output_tensors]
        if len(lists) != len(xs):
            raise CallError(f"output_tensors: expected one list for each of {len(xs)} input tensors, got {len(lists)}")
        for parts in lists:
            self._check_tensor_count(parts, "output_tensors", per_rank=len(xs))
            check_same_kind([*xs, *parts], "input_tensors, output_tensors")
            check_same_shape([*xs, *parts], "input_tensors, output_tensors")
        flat = flat_input(torch.stack([x.detach() for x in xs]))

        def copy_back(gathered: Array) -> None:
            for parts in lists:
                copy_flat_to_tensors(gathered, parts)

        return Work(self._issue_operation(copy_back, "all_gather", flat, None, limit=limit), lists)

    @c10d_operation("allgather_coalesced_", "all_gather")
    def allgather_coalesced(self, output_lists: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Copy several tensors of all ranks to every rank.

        Args:
            output_lists: A list of tensors for each rank: `output_lists[rank][i]` gets tensor `i` of that rank.
            input_tensors: Tensors of this rank.
            opts: See `Transfers`.
        """
        self._check_tensor_count(output_lists, "output_lists")
        xs, limit = list_tensors(input_tensors, "input_list"), self._time_limit_s(opts, None)
        for rank, outs in enumerate(output_lists):
            if len(list_tensors(outs, "output_lists")) != len(xs):
                raise CallError(
                    f"output_lists[{rank}]: expected {len(xs)} tensors, one for each input, got {len(outs)}"
                )
            for index, (out, x) in enumerate(zip(outs, xs, strict=True)):
                check_same_kind([x, out], f"input {index}, output_lists[{rank}]")
                if out.numel() != x.numel():
                    raise CallError(
                        f"output_lists: expected {x.numel()} elements in tensor {index} of number {rank}, as in the "
                        f"input, got {out.numel()}"
                    )
        check_memory(xs)
        columns = list(zip(*output_lists, strict=True))
        handles = [self._issue_all_gather(list(outs), x, limit) for outs, x in zip(columns, xs, strict=True)]
        return Work(JoinedOperations(handles), output_lists)

    def _issue_all_gather(
        self, parts: Tensors, tensor: torch.Tensor, limit: float, key: CallKey | None = None
    ) -> Handle:
        """Issue the all-gather of one tensor to a list with an output for each rank, of the size of its tensor.

        A call with unequal sizes is not kept under `key`.
        """
        self._check_tensor_count(parts, "output_tensors")
        check_same_kind([tensor, *parts], "output_tensors, input")
        counts, own = [part.numel() for part in parts], self._group.rank
        if counts[own] != tensor.numel():
            raise CallError(
                f"output_tensors: number {own} is for this rank's own tensor, which has {tensor.numel()} elements, "
                f"and has {counts[own]}; pass an output of its size"
            )
        even, out = None if len(set(counts)) == 1 else counts, _join_as_array(parts, tensor)
        copy_back = None if out is not None else lambda gathered: copy_flat_to_tensors(gathered, parts)
        key = key if even is None else None
        return self._issue_operation(
            copy_back, "all_gather", flat_input(tensor), out, counts=even, limit=limit, key=key
        )

    @c10d_operation("_allgather_base_", "all_gather")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Join the tensors of all ranks in one tensor.

        Args:
            output: Tensor that gets the tensors of all ranks, in rank order.
            input: This rank's tensor; all ranks have the same size.
            opts: See `Transfers`.
        """
        key = "all_gather", input.dtype, input.numel(), output.dtype, output.numel()
        if (work := self._reissue_call(key, input, output, opts, [output])) is not None:
            return work
        return Work(self._issue_all_gather_single(output, input, self._time_limit_s(opts, None), key), [output])

    @c10d_operation("allgather_into_tensor_coalesced_", "all_gather")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Join several tensors of all ranks, each by itself.

        Args:
            outputs: A tensor for each input, which gets the result.
            inputs: Tensors of this rank.
            opts: See `Transfers`.
        """
        outputs, inputs = self._check_outputs_and_inputs(outputs, inputs, joined_side="outputs")
        limit = self._time_limit_s(opts, None)
        fused, rest = self._split_indices_by_size(outputs, inputs)
        handles = [self._issue_all_gather_single(outputs[i], inputs[i], limit) for i in rest]
        outs, xs = [outputs[i] for i in fused], [inputs[i] for i in fused]
        return Work(JoinedOperations([*handles, *self._issue_fused("all_gather", outs, xs, limit=limit)]), outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _issue_all_gather_single(
        self, output: torch.Tensor, x: torch.Tensor, limit: float, key: CallKey | None = None
    ) -> Handle:
        """Issue the all-gather of the tensor `x` to one output."""
        check_same_kind([output, x], "output, input")
        out, copy_back = flat_output(output)
        return self._issue_operation(copy_back, "all_gather", flat_input(x), out, limit=limit, key=key)

    @c10d_operation("gather_", "gather")
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Copy the tensors of all ranks to the root.

        Args:
            output_tensors: On the root, a list with a tensor for each rank, or a list that has only this list; on other
                ranks an empty list.
            input_tensors: This rank's tensor; all ranks have the same size.
            opts: This and the others: see `Transfers`.
        """
        tensor = one_tensor(input_tensors, "input_tensors")
        dst = get_root(opts, root)
        limit, key = self._time_limit_s(opts, timeout), ("gather", tensor.dtype, tensor.numel(), dst)
        if self._group.rank != dst:
            if output_tensors and output_tensors != [[]]:
                own = f"this is rank {self._group.rank}"
                raise CallError(f"output_tensors: {own}, and only rank {dst} (dst) receives; pass none here")
            if timeout is None and (work := self._reissue_call(key, tensor, None, opts, [])) is not None:
                return work
            return Work(self._issue_operation(None, "gather", flat_input(tensor), dst, limit=limit, key=key), [])
        whole = self._join_adjacent_parts(output_tensors, tensor) if timeout is None else None
        parts = list_parts(output_tensors, "output_tensors")
        if whole is not None and (work := self._reissue_call(key, tensor, whole, opts, parts)) is not None:
            return work
        self._check_tensor_count(parts, "output_tensors")
        check_same_kind([tensor, *parts], "output_tensors, input")
        self._check_element_counts(parts, tensor, "output_tensors")
        out = _join_as_array(parts, tensor)
        copy_back = None if out is not None else lambda gathered: copy_flat_to_tensors(gathered, parts)
        return Work(
            self._issue_operation(copy_back, "gather", flat_input(tensor), dst, out, limit=limit, key=key), parts
        )

    @c10d_operation("scatter_", "scatter")
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Work:
        """Copy one of the root's tensors to each rank.

        Args:
            output_tensors: Tensor of this rank's part.
            input_tensors: On the root, a list with a tensor for each rank, or a list that has only this list; on other
                ranks an empty list.
            opts: This and the others: see `Transfers`.
        """
        output = one_tensor(output_tensors, "output_tensors")
        src = get_root(opts, root)
        limit, key = self._time_limit_s(opts, timeout), ("scatter", output.dtype, output.numel(), src)
        is_root = self._group.rank == src
        source = self._join_adjacent_parts(input_tensors, output) if is_root else None
        has_extra_parts = not is_root and bool(input_tensors) and input_tensors != [[]]
        # issued as an earlier call only if the root's inputs follow each other in memory, and other ranks pass none
        may_come_again = timeout is None and (source is not None if is_root else not has_extra_parts)
        if may_come_again and (work := self._reissue_call(key, source, output, opts, [output])) is not None:
            return work
        out, copy_back = flat_output(output)
        if is_root:
            parts = list_parts(input_tensors, "input_tensors")
            self._check_tensor_count(parts, "input_tensors")
            check_same_kind([output, *parts], "output, input_tensors")
            self._check_element_counts(parts, output, "input_tensors")
            side_by_side = _join_as_array(parts, output)
            flat = flat_input(torch.cat([part.reshape(-1) for part in parts])) if side_by_side is None else side_by_side
        elif has_extra_parts:
            own = f"this is rank {self._group.rank}"
            raise CallError(f"input_tensors: {own}, and only rank {src} (src) sends; pass none here")
        else:  # never read, but `scatter` of the group takes size and dtype from it
            flat = np.empty(out.size * self._group.size, out.dtype)
        return Work(self._issue_operation(copy_back, "scatter", flat, src, out, limit=limit, key=key), [output])

    def _join_adjacent_parts(self, parts: Any, like: torch.Tensor) -> torch.Tensor | None:
        """Return the flat tensor over one part for each rank, if they follow each other in memory; else None.

        The parts may also be the only list in a list. None also for anything else, and if a part has not the dtype and
        size of `like`.
        """
        if type(parts) is list and len(parts) == 1 and type(parts[0]) is list:
            parts = parts[0]
        if type(parts) is not list or len(parts) != self._group.size:
            return None
        dtype, count = like.dtype, like.numel()
        for part in parts:
            if not isinstance(part, torch.Tensor) or part.dtype is not dtype or part.numel() != count:
                return None
        return join_adjacent(parts)

    @c10d_operation("alltoall_base_", "all_to_all")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Cut a tensor along axis 0 and send part i to rank i; part i of the output comes from rank i.

        Args:
            output: Tensor of the result.
            input: Tensor that is cut.
            output_split_sizes: Number of rows from each rank; empty: equally many from each.
            input_split_sizes: Number of rows to each rank; empty: equally many to each.
            opts: This and the others: see `Transfers`.
        """
        check_same_kind([output, input], "output, input")
        limit = self._time_limit_s(opts, timeout)
        if not output_split_sizes and not input_split_sizes:
            return self._exchange_equal_parts(output, input, limit, opts)
        parts = _split_rows(output, output_split_sizes, self._group.size, "output_split_sizes")
        sent = _split_rows(input, input_split_sizes, self._group.size, "input_split_sizes")
        return self._exchange_by_messages("all_to_all_single", parts, sent, limit, value=output)

    alltoall_base = all_to_all_single

    @c10d_operation("alltoall_", "all_to_all")
    def alltoall(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Send tensor i of a list to rank i; tensor i of the outputs comes from rank i.

        Args:
            output_tensors: A tensor for each rank; their sizes may differ.
            input_tensors: A tensor for each rank.
            opts: This and the others: see `Transfers`.
        """
        outs, xs = list_tensors(output_tensors, "output_tensors"), list_tensors(input_tensors, "input_tensors")
        self._check_tensor_count(outs, "output_tensors")
        self._check_tensor_count(xs, "input_tensors")
        check_same_kind([*outs, *xs], "output_tensors, input_tensors")
        check_memory([*outs, *xs])
        return self._exchange_by_messages("all_to_all", outs, xs, self._time_limit_s(opts, timeout), value=outs)

    def _exchange_equal_parts(self, output: torch.Tensor, x: torch.Tensor, limit: float, opts: Any) -> Work:
        """Exchange equal parts of a tensor, by one collective; the output may overlap the input."""
        size = self._group.size
        for tensor, argument in ((output, "output"), (x, "input")):
            if tensor.dim() and tensor.size(0) % size:
                raise CallError(
                    f"{argument}: axis 0 has {tensor.size(0)} rows, which {size} ranks cannot share evenly; pass "
                    f"{argument}_split_sizes"
                )
        key = "all_to_all", x.dtype, x.numel(), output.dtype, output.numel()
        if (work := self._reissue_call(key, x, output, opts, [output], "all_to_all_single")) is not None:
            return work
        out, copy_back = flat_output(output)
        source = flat_input(x)
        if share_storage(output, x):
            source = source.copy()
        handle = self._issue_operation(
            copy_back, "all_to_all", source, out, limit=limit, key=key, name="all_to_all_single"
        )
        return Work(handle, [output])

    def _exchange_by_messages(self, name: str, parts: Tensors, sent: Tensors, limit: float, value: Any) -> Work:
        """Send each part as a message, so that no rank has to know the sizes of messages between other ranks.

        `parts` are received and `sent` sent, by rank. `name` is that of the operation in records. `value`, the list of
        outputs or the only output, is the result of the Work.
        """
        handles: list[Handle] = []
        issue = partial(self._issue_operation, limit=limit, site=users_frame(), name=name)
        for rank in range(self._group.size):
            out, copy_back = flat_output(parts[rank])
            handles.append(issue(copy_back, "receive_flat", out, rank, _ALL_TO_ALL_TAG))
        for rank, part in enumerate(sent):
            handles.append(issue(None, "send_flat", flat_input(part), rank, _ALL_TO_ALL_TAG))
        return Work(JoinedOperations(handles), [value] if isinstance(value, torch.Tensor) else value)

    @c10d_operation("send", "send")
    def send(self, tensors: Any, dst: int, tag: int) -> Work:
        """Send a tensor to a rank of the group.

        Args:
            tensors: The tensor, or a list of just that.
            dst: Receiving rank in the group.
            tag: Tag of the message.
        """
        return self._begin_message("send_flat", tensors, dst, tag)

    @c10d_operation("recv_", "recv")
    def recv(self, tensors: Any, src: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group; its size must be that of the message.

        Args:
            tensors: The tensor that is written, or a list of just that.
            src: Sending rank in the group.
            tag: Tag of the message.
        """
        return self._begin_message("receive_flat", tensors, src, tag)

    @c10d_operation("recv_any_source_", "recv")
    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        """Receive a tensor from any rank, which `work.source_rank()` returns. Arguments are as of `recv`."""
        return self._begin_message("receive_flat", tensors, None, tag)

    recvAnysource = recv_anysource

    def _begin_message(self, name: str, tensors: Any, peer: int | None, tag: int) -> Work:
        """Begin a send or a receive by the method `name` of the group; `peer` None receives from any rank."""
        tensor = one_tensor(tensors, "tensors")
        if not 0 <= tag < _TAGS:
            raise CallError(f"tag: expected 0 to {_TAGS - 1}, got {tag}")
        frame, limit_s, receives = users_frame(), self._timeout.total_seconds(), name == "receive_flat"
        # `f_lasti` tells apart several calls in one line; `users_frame` keeps the code alive, and so its id its own
        key = receives, peer, tag, tensor.dtype, tensor.numel(), id(frame.f_code), frame.f_lasti
        source: Callable[[], int] | None = partial(int, peer) if receives and peer is not None else None
        plain = is_plain(tensor)
        # Two frames up is the decorated method, then torch's `isend` or `irecv`, then perhaps `send` or `recv`: these
        # two wait for the message at once.
        begins = sys._getframe(2).f_back
        waits = begins is not None and begins.f_back is not None and begins.f_back.f_code in private.WAITING_CALLS
        # a call that comes again, from one line with one shape, skips the checks and the conversion
        known = self._group._messages.reissue(key, tensor, limit_s, frame, waits=waits) if plain else None
        if known is not None:
            self._seq += 1
            if not isinstance(known, int):
                return Work(cast(Handle, known), [tensor], source)
            # The message has ended already. `send` and `recv` wait for it at once, and do not return its Work.
            if waits and private.finished_work is not None:
                return cast("Work", private.finished_work)
            return Work(_FINISHED, [tensor], source)
        array, copy_back = flat_output(tensor) if receives else (flat_input(tensor), None)
        future = self._issue_on_group(name, (array, peer, tag), {}, limit_s, frame)
        if plain:
            self._group._messages.keep_for_reissue(key, future)
        if receives and source is None:
            source = lambda: int(future.src)  # noqa: E731
        return Work(future if copy_back is None else JoinedOperations([future], copy_back), [tensor], source)


def _join_as_array(parts: Tensors, other: torch.Tensor) -> Array | None:
    """Return tensors that follow each other in memory as one array; None if not, or if `other` shares the memory."""
    whole = None if share_storage(parts[0], other) else join_adjacent(parts)
    return None if whole is None else as_array(whole)


def _split_rows(tensor: torch.Tensor, sizes: Sequence[int], ranks: int, argument: str) -> Tensors:
    """Return the parts of a tensor along axis 0, of `sizes` rows; if that is empty, equal ones for all ranks.

    Raises a `CallError` if the sizes are not one for each rank, or do not add up to the rows of the tensor.
    """
    if not sizes:
        sizes = [tensor.size(0) // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != tensor.size(0):
        raise CallError(
            f"{argument}: expected {ranks} sizes that are {tensor.size(0)} rows together, got {list(sizes)}"
        )
    return list(tensor.split(list(sizes)))
