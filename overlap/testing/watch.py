"""Observation of a rank's PyTorch: times of its functions, tensors used too early, memory, weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..torch.operations import exclude_from_compiler, frame_line, users_frame
from .batches import Batches, nested_tensors
from .record import Issue, Record, Touch, WeightRecord
from .role_watch import RoleWatch
from .tensor_parts import digest, local_tensor, part_label
from .threads import RankThread

# Time of a function of torch: a launch, and what a device of 1 TB/s and 100 TFLOP/s takes; the same on every machine.
LAUNCH_NS, BYTES_PER_NS, FLOPS_PER_NS = 2_000, 1_000, 100_000


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Mode that observes every function of torch on a rank; where `timed`, they take time by bytes and flops.

    Args:
        thread: Thread of the rank.
        record: What tests know of the run.
    """

    def __init__(self, thread: RankThread[Any], record: Record, *, timed: bool = True) -> None:
        super().__init__()
        self._thread, self._record, self._timed = thread, record, timed
        self.rank: int = thread.rank.rank
        self.inside: int = 0  # our own code, which may use what is in flight
        self._flying: dict[int, tuple[Issue, int, bool]] = {}  # by address: its bytes, and whether it is written
        self._touched: set[str] = set()
        self._live_bytes = 0
        self._seen: set[int] = set()
        self.roles: RoleWatch | None = None  # until the first forward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not time or check functions of torch within a block."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    # -- operations under way ----------------------------------------------------------------------------------------

    def operation_issued(self, issue: Issue, arrays: list[tuple[int, int, bool]]) -> None:
        """Note the memory of an operation until its program has waited for it."""
        for address, nbytes, written in arrays:
            self._flying[address] = issue, nbytes, written

    def operation_awaited(self, issue: Issue) -> None:
        """Drop the memory of an operation that the program has waited for."""
        if self._flying:
            self._flying = {address: flying for address, flying in self._flying.items() if flying[0] is not issue}

    # -- functions ---------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: `exclude_from_compiler` keeps dynamo away, without a slow import of the compiler."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compile frames below this mode, which observes the functions of the compiled code."""
        return True

    @exclude_from_compiler
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, check its arguments, and add its time."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:  # the end of torch.tensor(...), whose memory is new
            self._count_memory(args[0])
        if self.roles is not None and not self.inside and self.roles.is_first_forward(func, nested_tensors(args)):
            self.roles = None
        if self.inside or func.is_view or func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        if self._flying:
            self._check_arguments(func, args, kwargs)
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

    def _check_arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = func._schema.arguments
        for position, value in enumerate(args):
            writes = position < len(schema) and bool(
                schema[position].alias_info and schema[position].alias_info.is_write
            )
            for tensor in nested_tensors(value):
                self._check_tensor(tensor, writes, func)
        for name, value in kwargs.items():
            for tensor in nested_tensors(value):
                self._check_tensor(tensor, name == "out", func)

    def _check_tensor(self, tensor: Any, writes: bool, func: Any) -> None:
        """Record the use of a tensor that an operation under way still reads or writes."""
        if not _has_memory(tensor) or not tensor.numel():
            return
        start = tensor.data_ptr()
        for address, (issue, nbytes, written) in self._flying.items():
            shared = start <= address < start + tensor.nbytes or address <= start < address + nbytes
            if shared and (written or writes) and issue.call.site not in self._touched:
                self._touched.add(issue.call.site)
                self._record.touches.append(
                    Touch(
                        rank=self.rank, issue=issue, line=frame_line(users_frame()),
                        how="written" if writes else "read", by=str(func.overloadpacket.__name__),
                    )
                    )  # fmt: skip

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
                self._drop_reused(storage.data_ptr(), nbytes)
                self._live_bytes += nbytes
                peak = self._record.peak_bytes
                peak[self.rank] = max(peak.get(self.rank, 0), self._live_bytes)
                weakref.finalize(storage, self._release_memory, key, nbytes)

    def _drop_reused(self, start: int, nbytes: int) -> None:
        """Drop operations with memory that a new tensor got: they ended, and the program never waits for them."""
        if self._flying:
            self._flying = {
                address: flying for address, flying in self._flying.items() if not start <= address < start + nbytes
            }

    def _release_memory(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._live_bytes -= nbytes


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an array in the memory of this process, and no wrapper of others."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and tensor.layout is torch.strided and tensor.device.type == "cpu"


class ModelWatch:
    """Weights of one rank: the parameters of its optimizers, by the names that they have in its modules."""

    rank: int

    def __init__(self, rank: int, record: Record) -> None:
        self.rank, self._record = rank, record
        self._modules: dict[int, torch.nn.Module] = {}
        self._optimized: dict[int, torch.Tensor] = {}
        self._updates = self._joins = 0
        self._summed: list[tuple[int, int]] = []  # where all ranks have added something up since the last update
        self._sums = False  # whether every update so far was made of such gradients only
        self.wrapped: bool = False  # whether DistributedDataParallel keeps them alike
        self.roles: RoleWatch = RoleWatch(rank, record, self.labelled)
        self.batches: Batches | None = None  # where runs are compared
        self.known: dict[int, torch.Tensor] = {}  # parameters of all optimizers, where runs are compared
        self.issued: int = 0  # operations

    @property
    def expects_same_weights(self) -> bool:
        """Whether the program means its ranks to have the same weights."""
        return self.wrapped or self._sums

    def operation_issued(self, issue: Issue, size: int, arrays: list[tuple[int, int, bool]]) -> None:
        """Note the memory that an operation adds up over all ranks."""
        self.issued += 1
        self.roles.operation_issued(issue)
        if issue.call.op == "all_reduce" and len(issue.call.members) == size:
            self._summed += [(address, address + nbytes) for address, nbytes, written in arrays if written]

    def add_module(self, module: torch.nn.Module) -> None:
        """Note a module that has parameters, or modules."""
        if not isinstance(module, _WRAPPERS):
            self._modules[id(module)] = module

    def before_update(self, optimizer: Any) -> None:
        """Note the gradients of an update that begins, and before the first one record the weights."""
        if self._updating is not None and self._updating is not optimizer:
            return  # an optimizer within another one, such as ZeroRedundancyOptimizer's, which then passes weights on
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
        names = self.names()
        self._lacking = tuple(
            names.get(id(p), "?") for group in optimizer.param_groups for p in group["params"]
            if p.requires_grad and p.grad is None and p.numel()  # FSDP1 leaves a rank without a part of some
        )  # fmt: skip
        if self.batches is not None:
            self.batches.before_update(optimizer, self.issued)

    _lacking: tuple[str, ...] = ()
    _updating: Any = None  # the outermost optimizer whose update is under way

    def after_update(self, optimizer: Any) -> None:
        """Record the weights after an update."""
        if self._updating is not optimizer:
            return
        self._updating = None
        self._updates += 1
        self.roles.over = self.batches is None or self.batches.over
        self._record_weights(self._lacking, optimizer)

    def restart_updates(self) -> None:
        """Restart the count of updates: ranks made different numbers of them on uneven inputs."""
        self._joins += 1
        self._updates = 0

    def _is_sum(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is in memory that all ranks have added up."""
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

    def names(self) -> dict[int, str]:
        """Return the name of each parameter by the id of its tensor, as the outermost module with it gives the name."""
        inner = {id(child) for module in self._modules.values() for child in module.children()}
        names: dict[int, str] = {}
        for module in sorted(self._modules.values(), key=lambda module: id(module) in inner):
            for name, parameter in module.named_parameters():
                names.setdefault(id(parameter), name.replace("_fsdp_wrapped_module.", ""))
        return names

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what this rank has of each parameter of `labelled`."""
        return {name: local_tensor(parameter).detach() for name, parameter in self.labelled().items()}

    def labelled(self) -> dict[str, torch.Tensor]:
        """Return the optimised parameters, or all without an optimizer; the name of a part has its position.

        Models may have parameters of one name: the second one is "weight of model 2".
        """
        return self._label_parameters(self._optimized or self._parameters(), part_label)

    def bare_names(self) -> dict[str, torch.Tensor]:
        """Return all parameters by names without the position of a part."""
        return self._label_parameters({**self._parameters(), **self.known}, lambda value, rank: "")

    def _parameters(self) -> dict[int, torch.Tensor]:
        return {id(p): p for module in self._modules.values() for p in module.parameters()}

    def _label_parameters(
        self, chosen: dict[int, torch.Tensor], label_part: Callable[[torch.Tensor, int], str]
    ) -> dict[str, torch.Tensor]:
        """Return parameters by name, and the number of their model."""
        names = self.names()
        labelled: dict[str, torch.Tensor] = {}
        for number, (key, value) in enumerate(chosen.items()):
            name, part, model = names.get(key, f"parameter {number}"), label_part(value, self.rank), 1
            while (label := f"{name}{f' of model {model}' if model > 1 else ''}{part}") in labelled:
                model += 1
            labelled[label] = value
        return labelled


def _group_settings(group: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if isinstance(value, _VALUES)}


# Modules whose only module is the model, by another name.
_WRAPPERS = (torch.nn.parallel.DistributedDataParallel,)
_VALUES = (bool, int, float, str, tuple, torch.Tensor)


def random_digest() -> str:
    """Return a digest of the state of torch's random numbers."""
    return xxhash.xxh64_hexdigest(memoryview(torch.default_generator.get_state().numpy()))
