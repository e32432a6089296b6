"""Operations of a process group from rank to rank: messages, and those of all to all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from .calling import users_frame
from .issuing import Issuing, Tensors, listed
from .tensors import flat_input, flat_output, one_tensor, overlaps, same_kind
from .work import Joined, Work

# The last tag of ours carries what goes from each rank to each other one, where their sizes differ.
_ALL_TO_ALL_TAG = (1 << 24) - 1
_TAGS = _ALL_TO_ALL_TAG


class Messages(Issuing):
    """all_to_all, send and recv, in the forms that torch has of them."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Cut a tensor along axis 0 and send part i to rank i; what comes from rank i is part i of the output."""
        same_kind([output, input], "output, input")
        limit = self._limit(opts, timeout)
        if not output_splits and not input_splits:
            return self._all_to_all_even(output, input, limit)
        parts = _split(output, output_splits, self._group.size, "output_split_sizes")
        sent = _split(input, input_splits, self._group.size, "input_split_sizes")
        return self._all_to_all(parts, sent, limit, output)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Send tensor i of a list to rank i; what comes from rank i is tensor i of the outputs."""
        self._check_count(outputs, "output_tensors")
        self._check_count(inputs, "input_tensors")
        same_kind([*outputs, *inputs], "output_tensors, input_tensors")
        return self._all_to_all(outputs, inputs, self._limit(opts, timeout), outputs)

    def _all_to_all_even(self, output: torch.Tensor, x: torch.Tensor, limit: float) -> Work:
        size = self._group.size
        for tensor, argument in ((output, "output"), (x, "input")):
            if tensor.dim() and tensor.size(0) % size:
                raise ValueError(
                    f"{argument}: axis 0 has {tensor.size(0)} rows, which {size} ranks cannot share evenly; pass "
                    f"{argument}_split_sizes"
                )
        out, place = flat_output(output)
        source = flat_input(x)
        if overlaps(output, x):
            source = source.copy()
        return Work(self._issue(place, "all_to_all", source, out, limit=limit), [output])

    def _all_to_all(self, parts: Tensors, sent: Tensors, limit: float, value: Any) -> Work:
        """Send each part as a message: nobody has to know what passes between others."""
        handles, site = [], users_frame()
        for rank in range(self._group.size):
            out, place = flat_output(parts[rank])
            handles.append(self._issue(place, "recv", out, rank, _ALL_TO_ALL_TAG, limit=limit, site=site))
        for rank, part in enumerate(sent):
            handles.append(self._issue(None, "send", flat_input(part), rank, _ALL_TO_ALL_TAG, limit=limit, site=site))
        return Work(Joined(handles), [value] if isinstance(value, torch.Tensor) else value)

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        tensor = one_tensor(listed(tensors), "tensors")
        _check_tag(tag)
        limit = self._limit(None, None)
        return Work(self._issue(None, "send", flat_input(tensor), dst, tag, limit=limit), [tensor])

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from whoever sends one; `work.source_rank()` says who did."""
        return self._recv(tensors, None, tag)

    recvAnysource = recv_anysource

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> Work:
        tensor = one_tensor(listed(tensors), "tensors")
        _check_tag(tag)
        out, place = flat_output(tensor)
        limit = self._limit(None, None)
        future = self._begin("recv", (out, src, tag), {}, limit, users_frame())
        handle = future if place is None else Joined([future], place)
        return Work(handle, [tensor], lambda: src if src is not None else int(future.src))


def _split(tensor: torch.Tensor, sizes: Sequence[int], ranks: int, argument: str) -> Tensors:
    if not sizes:
        sizes = [tensor.size(0) // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != tensor.size(0):
        raise ValueError(
            f"{argument}: expected {ranks} sizes that are {tensor.size(0)} rows together, got {list(sizes)}"
        )
    return list(tensor.split(list(sizes)))


def _check_tag(tag: int) -> None:
    if not 0 <= tag < _TAGS:
        raise ValueError(f"tag: expected 0 to {_TAGS - 1}, got {tag}")
