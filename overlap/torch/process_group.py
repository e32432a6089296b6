"""The process group that torch's functions call: tensors become arrays, options ours, and our futures Works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError
from ..runtime.group import Group
from . import monitored, sparse
from .calling import Site, users_site
from .errors import backend_error
from .options import reduction, seconds
from .tensors import Array, copy_blocks, flat_input, flat_output, one_tensor, overlaps, same_kind
from .work import Handle, Joined, Work

__all__ = ["ProcessGroup"]

# The last tag of ours carries what goes from each rank to each other one, where their sizes differ.
_ALL_TO_ALL_TAG = (1 << 24) - 1
_TAGS = _ALL_TO_ALL_TAG

Tensors = list[torch.Tensor]


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group, as torch wants it.

    Args:
        store: Of this group alone.
        group: Ours.
        timeout: How long an operation may take that names no limit.
        leave: Is called when torch shuts the group down.
        abort: Is called when torch gives it up: its operations fail.
    """

    def __init__(
        self,
        store: dist.Store,
        group: Group,
        timeout: timedelta,
        *,
        leave: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        super().__init__(group.rank, group.size)  # with a store, no class of Python may be made from it
        self._store, self._group, self._timeout = store, group, timeout
        self._leave, self._abort = leave, abort
        self._name, self._description = group.name, "undefined"
        self._seq = 0
        self._barriers = 0

    # -- who it is -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name that it is registered by."""
        return "overlap"

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """The name that torch gave it."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name  # noqa: N815

    @property
    def group_desc(self) -> str:
        """What it is for, as its maker said."""
        return self._description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what it is for, as its maker said."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"device: backend 'overlap' is for the CPU, got {device}")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def get_group_store(self) -> dist.Store:
        """Return the store of this group."""
        return self._store

    # -- its life ------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take that names no limit."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group; the last one of a world ends this process's part in it."""
        self._leave()

    def abort(self) -> None:
        """Fail what is under way, here and on the other ranks of the group."""
        self._abort()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ProcessGroup | None:
        """Make the group of some group ranks; every rank of this group calls it with the ranks of its own part.

        Returns:
            None on a rank that is not among them.
        """
        if self._group.rank not in new_ranks:
            return None
        part = self._group.group(new_ranks, name=group_name)
        store = dist.PrefixStore(f"{group_name or part.name}/", self._store)
        made = ProcessGroup(store, part, timeout or self._timeout, leave=_nothing, abort=self._abort)
        made._name, made._description = group_name or part.name, group_desc or "undefined"
        return made

    def _set_sequence_number_for_group(self) -> None:
        self._seq = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._seq

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: there are no hooks to wait for."""

    def _start_coalescing(self, device: object) -> None:
        raise RuntimeError("coalescing: backend 'overlap' starts each operation at once; use the *_coalesced forms")

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine a tensor of all ranks, in place."""
        tensor = one_tensor(_listed(tensors), "tensors")
        op, limit = self._reduction(opts, timeout)
        if tensor.layout is not torch.strided:
            return sparse.all_reduce(self._group, tensor, op, limit)
        return Work(self._all_reduce(tensor, op, limit), [tensor])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Combine several tensors of all ranks, each in place."""
        same_kind(tensors, "tensors")
        op, limit = self._reduction(opts, None)
        return Work(Joined([self._all_reduce(tensor, op, limit) for tensor in tensors]), tensors)

    def _all_reduce(self, tensor: torch.Tensor, op: Any, limit: float) -> Handle:
        name, factor = op
        if factor is not None:
            tensor.mul_(factor)
        out, place = flat_output(tensor)
        return self._issue(place, "all_reduce", out, name, out, limit=limit)

    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: timedelta | None = None, opts: Any = None
    ) -> Work:
        """Combine a tensor of all ranks on the root; what the tensors of the others then hold is not said."""
        opts = opts if opts is not None else None if isinstance(root, int) else root
        tensor = one_tensor(_listed(tensors), "tensors")
        (name, factor), limit = self._reduction(opts if opts is not None else op, timeout)
        dst = root if isinstance(root, int) else int(opts.rootRank)
        if factor is not None:
            tensor.mul_(factor)
        if self._group.rank != dst:
            return Work(self._issue(None, "reduce", flat_input(tensor), dst, name, limit=limit), [tensor])
        out, place = flat_output(tensor)
        return Work(self._issue(place, "reduce", out, dst, name, out, limit=limit), [tensor])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Combine as many tensors of all ranks as there are ranks; rank r keeps the r-th."""
        output = one_tensor(_listed(outputs), "output_tensors")
        parts = _nested(inputs, "input_tensors")
        self._check_count(parts, "input_tensors")
        (name, factor), limit = self._reduction(opts, timeout)
        flat = torch.cat([part.reshape(-1) for part in parts])
        if factor is not None:
            flat.mul_(factor)
        counts = [part.numel() for part in parts]
        even = None if len(set(counts)) == 1 else counts
        return Work(self._reduce_scatter(output, flat, name, limit, even), [output])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Combine a tensor of all ranks; rank r keeps its r-th part."""
        (name, factor), limit = self._reduction(opts, None)
        x = input if factor is None else input * factor
        return Work(self._reduce_scatter(output, x, name, limit), [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do so with several tensors."""
        (name, factor), limit = self._reduction(opts, None)
        pairs = zip(outputs, inputs, strict=True)
        scaled = [(out, x if factor is None else x * factor) for out, x in pairs]
        return Work(Joined([self._reduce_scatter(out, x, name, limit) for out, x in scaled]), outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, output: torch.Tensor, x: torch.Tensor, op: str, limit: float, counts: list[int] | None = None
    ) -> Handle:
        same_kind([output, x], "output, input")
        source = flat_input(x)
        if overlaps(output, x):
            source = source.copy()
        out, place = flat_output(output)
        return self._issue(place, "reduce_scatter", source, op, out, counts=counts, limit=limit)

    # -- copies --------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give every rank the root's tensor."""
        tensor = one_tensor(_listed(tensors), "tensors")
        root = opts if isinstance(opts, int) else int(opts.rootRank)
        limit = self._limit(opts, timeout)
        out, place = flat_output(tensor)
        if self._group.rank == root:
            place = None
        return Work(self._issue(place, "broadcast", out, root, out, limit=limit), [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Give every rank the tensors of all ranks, which may differ in size."""
        tensor = one_tensor(_listed(inputs), "input_tensors")
        parts = _nested(outputs, "output_tensors")
        return Work(self._all_gather(parts, tensor, self._limit(opts, timeout)), [parts])

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """Give every rank several tensors of all ranks: `output_lists[rank][i]` is tensor `i` of a rank."""
        self._check_count(output_lists, "output_lists")
        limit = self._limit(opts, None)
        columns = list(zip(*output_lists, strict=True))
        handles = [self._all_gather(list(outs), x, limit) for outs, x in zip(columns, inputs, strict=True)]
        return Work(Joined(handles), output_lists)

    def _all_gather(self, parts: Tensors, tensor: torch.Tensor, limit: float) -> Handle:
        self._check_count(parts, "output_tensors")
        same_kind([tensor, *parts], "output_tensors, input")
        counts = [part.numel() for part in parts]
        even = None if len(set(counts)) == 1 else counts
        return self._issue(
            lambda gathered: copy_blocks(gathered, parts), "all_gather", flat_input(tensor), counts=even, limit=limit
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Join the tensors of all ranks."""
        return Work(self._all_gather_single(output, input, self._limit(opts, None)), [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Do so with several tensors."""
        limit = self._limit(opts, None)
        pairs = zip(outputs, inputs, strict=True)
        return Work(Joined([self._all_gather_single(out, x, limit) for out, x in pairs]), outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, output: torch.Tensor, x: torch.Tensor, limit: float) -> Handle:
        same_kind([output, x], "output, input")
        out, place = flat_output(output)
        return self._issue(place, "all_gather", flat_input(x), out, limit=limit)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        """Give the root the tensors of all ranks."""
        tensor = one_tensor(_listed(inputs), "input_tensors")
        dst = opts if isinstance(opts, int) else root if root is not None else int(opts.rootRank)
        limit = self._limit(opts, timeout)
        if self._group.rank != dst:
            if outputs and outputs != [[]]:
                raise ValueError(f"output_tensors: only rank {dst}, which gathers, has any; pass none")
            return Work(self._issue(None, "gather", flat_input(tensor), dst, limit=limit), [])
        parts = _nested(outputs, "output_tensors")
        self._check_count(parts, "output_tensors")
        same_kind([tensor, *parts], "output_tensors, input")
        self._check_sizes(parts, tensor, "output_tensors")
        handle = self._issue(
            lambda gathered: copy_blocks(gathered, parts), "gather", flat_input(tensor), dst, limit=limit
        )
        return Work(handle, [parts])

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Work:
        """Give each rank one of the root's tensors."""
        output = one_tensor(_listed(outputs), "output_tensors")
        src = opts if isinstance(opts, int) else root if root is not None else int(opts.rootRank)
        limit = self._limit(opts, timeout)
        whole: Array | None = None
        if self._group.rank == src:
            parts = _nested(inputs, "input_tensors")
            self._check_count(parts, "input_tensors")
            same_kind([output, *parts], "output, input_tensors")
            self._check_sizes(parts, output, "input_tensors")
            whole = flat_input(torch.cat([part.reshape(-1) for part in parts]))
        elif inputs and inputs != [[]]:
            raise ValueError(f"input_tensors: only rank {src}, which scatters, has any; pass none")
        out, place = flat_output(output)
        return Work(self._issue(place, "scatter", whole, src, out, limit=limit), [output])

    # -- all to all ----------------------------------------------------------------------------------------------

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
        handles, site = [], users_site()
        for rank in range(self._group.size):
            out, place = flat_output(parts[rank])
            handles.append(self._issue(place, "recv", out, rank, _ALL_TO_ALL_TAG, limit=limit, site=site))
        for rank, part in enumerate(sent):
            handles.append(self._issue(None, "send", flat_input(part), rank, _ALL_TO_ALL_TAG, limit=limit, site=site))
        return Work(Joined(handles), [value] if isinstance(value, torch.Tensor) else value)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        """Send a tensor to a rank of the group."""
        tensor = one_tensor(_listed(tensors), "tensors")
        _check_tag(tag)
        return Work(self._issue(None, "send", flat_input(tensor), dst, tag, limit=self._limit(None, None)), [tensor])

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        """Receive a tensor from a rank of the group."""
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from whoever sends one; `work.source_rank()` says who did."""
        return self._recv(tensors, None, tag)

    recvAnysource = recv_anysource  # noqa: N815

    def _recv(self, tensors: Tensors, src: int | None, tag: int) -> Work:
        tensor = one_tensor(_listed(tensors), "tensors")
        _check_tag(tag)
        out, place = flat_output(tensor)
        future = self._begin("recv", (out, src, tag), {}, self._limit(None, None), users_site())
        handle = future if place is None else Joined([future], place)
        return Work(handle, [tensor], lambda: src if src is not None else int(future.src))

    # -- barriers ------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Be done once every rank of the group has come to it."""
        return Work(self._issue(None, "barrier", limit=self._limit(opts, timeout)), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank of the group; rank 0 says which did not come in time.

        Args:
            timeout: How long.
            wait_all_ranks: Name all that did not come, not only the first.

        Raises:
            DistBackendError: If one did not come.
        """
        self._barriers += 1
        limit = self._timeout if timeout is None else timeout
        monitored.barrier(self._store, self._group.rank, self._group.size, self._barriers, limit, every=wait_all_ranks)

    # -- below ---------------------------------------------------------------------------------------------------

    def _issue(
        self, place: Callable[..., None] | None, name: str, *args: Any, limit: float, site: Site | None = None, **more: Any
    ) -> Handle:
        future = self._begin(name, args, more, limit, site or users_site())
        if place is None:
            return future
        if name in ("all_gather", "gather") and len(args) < (2 if name == "all_gather" else 3):
            return Joined([future], lambda: place(future.result(0)))
        return Joined([future], place)

    def _begin(self, name: str, args: tuple[Any, ...], more: dict[str, Any], limit: float, site: Site) -> Any:
        self._seq += 1
        try:
            return getattr(self._group, name)(*args, **more)
        except UsageError as error:
            raise ValueError(f"{error} (called at {site})") from error
        except Exception as error:
            raise backend_error(error) from error

    def _reduction(self, opts: Any, timeout: timedelta | None) -> tuple[tuple[str, Any], float]:
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return reduction(op), self._limit(opts, timeout)

    def _limit(self, opts: Any, timeout: timedelta | None) -> float:
        return seconds(timeout if timeout is not None else getattr(opts, "timeout", None), self._timeout)

    def _check_count(self, tensors: Sequence[object], argument: str) -> None:
        if len(tensors) != self._group.size:
            raise ValueError(f"{argument}: expected one for each of the {self._group.size} ranks, got {len(tensors)}")

    def _check_sizes(self, tensors: Tensors, like: torch.Tensor, argument: str) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.numel() != like.numel():
                raise ValueError(
                    f"{argument}: all must have {like.numel()} elements, as this rank's own has, number {index} has "
                    f"{tensor.numel()}"
                )


def _nothing() -> None:
    """Leave a part of a group: there is nothing of its own to end."""


def _listed(tensors: Any) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _nested(tensors: Any, argument: str) -> Tensors:
    """Return the one list of tensors, of what is a list of them or a list of such lists."""
    if tensors and isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise ValueError(f"{argument}: expected one list, for the one CPU of this rank, got {len(tensors)}")
    return list(tensors[0])


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
