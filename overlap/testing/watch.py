"""Watches of a rank's PyTorch: times of its functions, tensors used too early, memory, weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..torch.operations import exclude_from_compiler, frame_line, users_frame
from .batches import Batches, nested_tensors
from .record import Issue, Record, Touch, WeightRecord
from .role_watch import RoleWatch
from .tensor_parts import digest, local_tensor, shard_label
from .threads import RankThread

# Virtual time of a function of torch: a launch, plus its bytes at 1 TB/s and its flops at 100 TFLOP/s.
LAUNCH_NS, BYTES_PER_NS, FLOPS_PER_NS = 2_000, 1_000, 100_000


class ArrayMemory(NamedTuple):
    """The memory of an array that an operation reads or writes."""

    address: int
    nbytes: int
    is_written: bool


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Mode of torch that watches every function that a rank calls: its time, its memory, and tensors in flight.

    Attributes:
        rank: The rank.
        inside: Greater than 0 while code of overlap runs, which is not watched.
        roles: Watch of roles, until the first forward; then None.

    Args:
        thread: Thread of the rank.
        record: The record of the run.
        timed: Whether functions take virtual time, by their bytes and flops.
    """

    def __init__(self, thread: RankThread[Any], record: Record, *, timed: bool = True) -> None:
        super().__init__()
        self._thread, self._record, self._timed = thread, record, timed
        self.rank: int = thread.rank.rank
        self.inside: int = 0
        self._in_flight: dict[int, tuple[Issue, ArrayMemory]] = {}  # operations under way, by address of their arrays
        self._touched: set[str] = set()  # lines of operations for which a use in flight was recorded
        self._live_bytes = 0  # bytes of the tensors that the rank holds
        self._seen: set[int] = set()  # storages that are counted in these bytes
        self.roles: RoleWatch | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch functions of torch during a `with` block."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    # -- operations under way ----------------------------------------------------------------------------------------

    def on_operation_issued(self, issue: Issue, arrays: list[ArrayMemory]) -> None:
        """Add the memory of an operation to the memory in flight, until the program has waited for it."""
        self._in_flight.update((array.address, (issue, array)) for array in arrays)

    def on_operation_awaited(self, issue: Issue) -> None:
        """Remove the memory of an operation that the program has waited for from the memory in flight."""
        if self._in_flight:
            self._in_flight = {address: flying for address, flying in self._in_flight.items() if flying[0] is not issue}

    # -- functions ---------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import its compiler to wrap the methods of this mode, which is slow."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch compiles frames under this mode; it watches the functions of compiled code."""
        return True

    @exclude_from_compiler
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; check its arguments, and count its time and memory."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:  # called by torch.tensor(...) with the new tensor
            self._count_memory(args[0])
        if self.roles is not None and not self.inside and self.roles.record_first_forward(func, nested_tensors(args)):
            self.roles = None
        if self.inside or func.is_view or func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        if self._in_flight:
            self._record_conflicts(func, args, kwargs)
        out = func(*args, **kwargs)
        tensors = [
            tensor for tensor in nested_tensors((args, out)) if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        ]
        if self._timed:
            nbytes = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
            counted = flop_registry.get(func.overloadpacket)
            flops = 0.0 if counted is None else float(counted(*args, **kwargs, out_val=out))
            self._thread.cost_ns += round(LAUNCH_NS + nbytes / BYTES_PER_NS + flops / FLOPS_PER_NS)
        self._count_memory(out)
        return out

    def _record_conflicts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record arguments of a function that conflict with operations under way, see `_record_tensor_conflicts`."""
        aliases = (argument.alias_info for argument in func._schema.arguments)
        are_written = (alias is not None and alias.is_write for alias in aliases)
        values = [*zip(args, are_written, strict=False), *((value, name == "out") for name, value in kwargs.items())]
        for value, is_written in values:
            for tensor in nested_tensors(value):
                self._record_tensor_conflicts(tensor, is_written, func)

    def _record_tensor_conflicts(self, tensor: Any, is_written: bool, func: Any) -> None:
        """Record a `Touch` if a tensor shares memory with an operation under way, and one of the two writes it.

        For each line that issues operations, only the first such use is recorded.
        """
        if not _has_memory(tensor) or not tensor.numel():
            return
        start = tensor.data_ptr()
        for address, (issue, array) in self._in_flight.items():
            shared = start <= address < start + tensor.nbytes or address <= start < address + array.nbytes
            if shared and (array.is_written or is_written) and issue.call.site not in self._touched:
                self._touched.add(issue.call.site)
                how, by = "written" if is_written else "read", str(func.overloadpacket.__name__)
                touch = Touch(rank=self.rank, issue=issue, line=frame_line(users_frame()), how=how, by=by)
                self._record.touches.append(touch)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _count_memory(self, out: Any) -> None:
        """Add the memory of new tensors to the bytes that the rank holds."""
        for tensor in nested_tensors(out):
            if not _has_memory(tensor):
                continue
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._seen:
                self._seen.add(key)
                self._drop_reused_memory(storage.data_ptr(), nbytes)
                self._live_bytes += nbytes
                peak = self._record.peak_bytes
                peak[self.rank] = max(peak.get(self.rank, 0), self._live_bytes)
                weakref.finalize(storage, self._release_memory, key, nbytes)

    def _drop_reused_memory(self, start: int, nbytes: int) -> None:
        """Remove operations whose freed memory a new tensor has: they have ended, and its uses are no conflicts."""
        if self._in_flight:
            self._in_flight = {
                address: flying for address, flying in self._in_flight.items() if not start <= address < start + nbytes
            }

    def _release_memory(self, key: int, nbytes: int) -> None:
        """Subtract freed memory from the live bytes; forget its key, which another storage may get."""
        self._seen.discard(key)
        self._live_bytes -= nbytes


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain array in the memory of this process, not a wrapper of other tensors."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.layout is torch.strided and tensor.device.type == "cpu"


class ModelWatch:
    """Watch of one rank's models and optimizers: it records the weights before the first and after each update.

    Args:
        rank: The rank.
        record: The record of the run.
    """

    def __init__(self, rank: int, record: Record) -> None:
        self._record = record
        self.rank: int = rank
        self._modules: dict[int, torch.nn.Module] = {}  # by id
        self._optimized: dict[int, torch.Tensor] = {}  # parameters that an optimizer has updated, by id
        self._updates = self._joins = 0  # updates since the last `Join` context; such contexts
        self._updating: Any = None  # the outermost optimizer whose update is under way
        self._lacking: tuple[str, ...] = ()  # names of weights without a gradient in that update
        # Memory, as (start, end), that all ranks have added up since the last update.
        self._summed: list[tuple[int, int]] = []
        self._sums = False  # whether all gradients of all updates so far were in such memory
        self.is_wrapped: bool = False  # whether DistributedDataParallel keeps the weights of ranks equal
        self.roles: RoleWatch = RoleWatch(rank, record, self.labelled_parameters)
        self.batches: Batches | None = None  # recorder of updates, if runs are compared
        self.known: dict[int, torch.Tensor] = {}  # parameters of all optimizers, by id, if runs are compared
        self.issued: int = 0  # number of operations that the rank has issued

    @property
    def expects_same_weights(self) -> bool:
        """Whether ranks should have the same weights: by DistributedDataParallel, or as they add up all gradients."""
        return self.is_wrapped or self._sums

    def on_operation_issued(self, issue: Issue, size: int, arrays: list[ArrayMemory]) -> None:
        """Count an operation; if it adds up over all ranks, keep the memory of its result for `on_update_begin`.

        Args:
            issue: The operation.
            size: Number of ranks of the world.
            arrays: Memory of the operation's arrays.
        """
        self.issued += 1
        self.roles.on_operation_issued(issue)
        if issue.call.op == "all_reduce" and len(issue.call.members) == size:
            self._summed += [(array.address, array.address + array.nbytes) for array in arrays if array.is_written]

    def add_module(self, module: torch.nn.Module) -> None:
        """Add a module to those whose parameters are watched, unless it is a wrapper of the model."""
        if not isinstance(module, _WRAPPERS):
            self._modules[id(module)] = module

    def on_update_begin(self, optimizer: Any) -> None:
        """Look at the gradients of an update that begins; before the first update, record the weights."""
        if self._updating is not None and self._updating is not optimizer:
            return  # an optimizer inside another one, such as that of ZeroRedundancyOptimizer: the outer one counts
        self._updating = optimizer
        fresh = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._optimized]
        self._optimized.update((id(p), p) for p in fresh)
        if not self._updates:
            self._record_weights((), optimizer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._sums = (
            (self._sums or not (self._updates or self._joins)) and bool(gradients) and all(map(self._is_sum, gradients))
        )
        self._summed.clear()
        names = self.parameter_names()
        self._lacking = tuple(
            names.get(id(p), "?") for group in optimizer.param_groups for p in group["params"]
            if p.requires_grad and p.grad is None and p.numel()  # with FSDP1, a rank may have an empty part
        )  # fmt: skip
        if self.batches is not None:
            self.batches.record_gradients(optimizer, self.issued)

    def on_update_end(self, optimizer: Any) -> None:
        """Record the weights after an update."""
        if self._updating is not optimizer:
            return
        self._updating = None
        self._updates += 1
        self.roles.over = self.batches is None or self.batches.over
        self._record_weights(self._lacking, optimizer)

    def restart_update_count(self) -> None:
        """Restart the count of updates, after a `Join` context in which ranks made different numbers of updates."""
        self._joins += 1
        self._updates = 0

    def _is_sum(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is in memory that all ranks have added up since the last update."""
        if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
            return False
        return any(begin <= gradient.data_ptr() < end for begin, end in self._summed)

    def _record_weights(self, lacking: tuple[str, ...], optimizer: Any) -> None:
        """Record digests of all weights, the names of weights without a gradient, and the optimizer's settings."""
        digests = {name: digest(value) for name, value in self.weights().items()}
        self._record.weights.append(
            WeightRecord(
                rank=self.rank, step=self._updates, joins=self._joins, digests=digests, without_gradient=lacking,
                line=frame_line(users_frame()), settings=tuple(map(_group_settings, optimizer.param_groups)),
                randomness=random_digest(),
            )
        )  # fmt: skip

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter, by the id of its tensor.

        A parameter of nested modules has the name that the outermost module gives it, such as "layers.0.weight".
        """
        inner_ids = {id(child) for module in self._modules.values() for child in module.children()}
        names: dict[int, str] = {}
        outermost_first = sorted(self._modules.values(), key=lambda module: id(module) in inner_ids)
        for module in outermost_first:
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name.replace("_fsdp_wrapped_module.", ""))
        return names

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's shard of each parameter, by the names of `labelled_parameters`."""
        return {name: local_tensor(parameter).detach() for name, parameter in self.labelled_parameters().items()}

    def labelled_parameters(self) -> dict[str, torch.Tensor]:
        """Return the optimised parameters by name; without an optimizer, all parameters.

        The name of a shard ends with its position, " [part 0]". If two models have a parameter "weight", the second one
        is "weight of model 2".
        """
        return self._label_parameters(self._optimized or self._parameters(), shard_label)

    def unlabelled_parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters by name; names have no position of a shard."""
        return self._label_parameters({**self._parameters(), **self.known}, lambda value, rank: "")

    def _parameters(self) -> dict[int, torch.Tensor]:
        """Return the parameters of all modules by the id of their tensor."""
        return {id(p): p for module in self._modules.values() for p in module.parameters()}

    def _label_parameters(
        self, chosen: dict[int, torch.Tensor], label_part: Callable[[torch.Tensor, int], str]
    ) -> dict[str, torch.Tensor]:
        """Return parameters by name and text of `label_part`; a second equal name gets " of model 2", and so on."""
        names = self.parameter_names()
        labelled: dict[str, torch.Tensor] = {}
        for number, (key, value) in enumerate(chosen.items()):
            name, part, model = names.get(key, f"parameter {number}"), label_part(value, self.rank), 1
            while (label := f"{name}{f' of model {model}' if model > 1 else ''}{part}") in labelled:
                model += 1
            labelled[label] = value
        return labelled


def _group_settings(group: dict[str, Any]) -> dict[str, str]:
    """Return the settings of an optimizer's parameter group as texts, such as {"lr": "0.1"}, to compare ranks."""
    return {name: repr(value) for name, value in group.items() if isinstance(value, _VALUES)}


# Modules that wrap a model: its parameters keep the names that they have in the model.
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel,)
_VALUES = (bool, int, float, str, tuple, torch.Tensor)


def random_digest() -> str:
    """Return a digest of the state of torch's random number generator."""
    return xxhash.xxh64_hexdigest(memoryview(torch.default_generator.get_state().numpy()))
