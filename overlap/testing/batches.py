"""Data, weights and gradients of a rank's first updates: recorded, and on other ranks replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..torch.operations import frame_line, users_frame
from .substitutes import Loss, StopRun, Substitute, UpdateRecord
from .tensor_parts import Part

# Most updates that are recorded: an outer optimizer may make its first one after some of an inner one. Gradients are
# kept of the first update of each optimizer, and of the second update of all.
_UPDATES = 8
# Most bytes of data of a rank that are recorded.
_DATA_BYTES = 256 << 20


class Batches(TorchFunctionMode):  # type: ignore[misc]
    """Recorder of one rank's first updates: data, weights, losses and gradients.

    Data are the tensors that enter a model, or that meet a tensor with a gradient outside of a model.

    Attributes:
        steps: The record of each update so far, and of the present one.
        over: Whether recording has ended.
        half: Whether anything was computed in 16 bits.

    Args:
        rank: The rank.
        names: Returns the rank's parameters by name.
        source: Source of data and weights that replace those of the program; None: they stay.
        updates: The number of updates after which the rank ends; None: it goes on.
        every: Whether the gradients of every update are recorded.
    """

    def __init__(
        self,
        rank: int,
        names: Callable[[], dict[str, torch.Tensor]],
        source: Substitute | None = None,
        updates: int | None = None,
        *,
        every: bool = False,
    ) -> None:
        super().__init__()
        self._rank, self._names, self._source, self._last, self._every = rank, names, source, updates, every
        self.steps: list[UpdateRecord] = [UpdateRecord()]
        self._optimizers: dict[int, Any] = {}
        # Data of this step, by id; keeping the tensors makes sure that no other one gets the id.
        self._entered: dict[int, torch.Tensor] = {}
        self._depth = self._bytes = 0  # modules that are being called; bytes of data recorded so far
        self._begun = False  # whether a forward of this step has begun
        self.over: bool = False
        self.half: bool = False

    # -- data --------------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, without dropout; record data that meets a tensor with a gradient.

        Dropout draws other random numbers in each run, so that runs could not be compared.
        """
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0]
        if func is functional.scaled_dot_product_attention:
            # `dropout_p` and `is_causal` are the fifth and sixth parameter, and may be positional.
            later = zip(("dropout_p", "is_causal"), args[4:], strict=False)
            args, kwargs = args[:4], {**dict(later), **kwargs, "dropout_p": 0.0}
        if func is functional.multi_head_attention_forward:
            kwargs["training"] = False
        if not (self.over or self._depth) and torch.is_grad_enabled():
            if func is torch.Tensor.backward:
                self._record_loss(args[0])
            elif func.__name__ not in _NO_DATA:
                tensors = list(nested_tensors((args, kwargs)))
                if len(tensors) > 1 and any(tensor.requires_grad for tensor in tensors):
                    self._record_data(tensors)
        return func(*args, **kwargs)

    def call_module(self, original: Callable[..., Any], module: nn.Module, args: Any, keywords: Any) -> Any:
        """Call a module; record the data that enters it, unless it is called inside another module.

        Args:
            original: `Module.__call__` of torch.
            module: The module.
            args: Positional arguments of the call.
            keywords: Keyword arguments of the call.
        """
        if self.over or self._depth or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return original(module, *args, **keywords)
        self._record_data(nested_tensors((args, keywords)))
        before = torch.default_generator.get_state()
        self.half |= torch.is_autocast_enabled("cpu")
        self._depth += 1
        try:
            return original(module, *args, **keywords)
        finally:
            self._depth -= 1
            if not torch.equal(before, torch.default_generator.get_state()):
                self.steps[-1].draws = frame_line(users_frame())

    def _record_data(self, tensors: Any) -> None:
        """Record tensors as data of this step; if there is a source, set their values to its values, in place."""
        step = self.steps[-1]
        if not self._begun:
            self._begun = True
            self._record_weights()
        gradients = {id(parameter.grad) for parameter in self._names().values()} if step.losses else ()
        for tensor in tensors:
            if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.numel():
                continue
            if id(tensor) in self._entered or id(tensor) in gradients:
                continue
            self._entered[id(tensor)] = tensor
            self._bytes += tensor.nbytes
            self.over = self.over or self._bytes > _DATA_BYTES
            if self._source is not None:
                datum = self._source.joined_datum(self._rank, len(self.steps) - 1, len(step.data), tensor)
                tensor.data = datum.clone()
            self.half |= tensor.dtype in (torch.bfloat16, torch.float16)
            step.data.append(tensor.detach().clone())

    def _record_weights(self) -> None:
        """Record the weights before the first two updates; if there is a source, set them to its values first."""
        update = len(self.steps) - 1
        if update > 1:
            return
        with torch.no_grad():
            for name, parameter in self._names().items():
                part = Part.of(parameter)
                if part is None:
                    continue
                values = None if self._source is None else self._source.joined_weight(self._rank, update, name, part)
                if values is not None:
                    part.tensor.copy_(values)
                self.half |= part.tensor.dtype in (torch.bfloat16, torch.float16)
                self.steps[-1].weights[name] = part.copy()

    def _record_loss(self, root: Any) -> None:
        """Record the scalar loss at which a backward pass begins."""
        if type(root) is torch.Tensor and root.numel() == 1:
            scale, is_mean = _find_loss_scale(root.grad_fn)
            # Gradients that are not zero: this backward adds to those of an earlier one. Only eight are looked at: a
            # look at all would take long.
            grads = [parameter.grad for parameter in self._names().values() if parameter.grad is not None]
            adds = any(bool(Part.of(grad).tensor.any()) for grad in grads[:8])  # type: ignore[union-attr]
            self.steps[-1].losses.append(Loss(float(root.detach()), scale, is_mean, adds, frame_line(users_frame())))

    # -- updates -----------------------------------------------------------------------------------------------------

    def record_gradients(self, optimizer: Any, issued: int) -> None:
        """Record the gradients of an update that begins.

        Args:
            optimizer: The optimizer that makes the update.
            issued: Number of operations that the rank has issued so far.

        Raises:
            StopRun: This was the last update that is compared.
        """
        if self.over:
            return
        step = self.steps[-1]
        step.issued = issued
        if id(optimizer) not in self._optimizers or len(self.steps) <= 2 or self._every:
            step.line = frame_line(users_frame())
            self._optimizers[id(optimizer)] = optimizer
            names = {id(parameter): name for name, parameter in self._names().items()}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter))
                    part = None if parameter.grad is None else Part.of(parameter.grad)
                    if name is not None and part is not None:
                        step.gradients[name] = part.copy()
                        step.rates[name] = float(group.get("lr", 1.0))
        self.steps.append(UpdateRecord())
        self._entered.clear()
        self._begun = False
        self.over = len(self.steps) > _UPDATES
        if self._last is not None and len(self.steps) > self._last:
            raise StopRun


_DROPOUTS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)
# Functions of a tensor with a gradient and another that is no data, as in `p.grad = gradient`, `module.to(dtype)`.
_NO_DATA = ("__set__", "copy_", "_has_compatible_shallow_copy_type", "equal", "allclose")


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from nested_tensors(item)


def _find_loss_scale(node: Any) -> tuple[float, bool]:
    """Return a loss's constant factor, and whether the rest is a mean: (1.5, True) of `losses.mean() * 3 / 2`."""
    scale = 1.0
    while node is not None:
        name = type(node).__name__
        if name in ("MulBackward0", "DivBackward0"):
            others = [saved for saved in (node._saved_other, node._saved_self) if saved is not None]
            paths = [path for path, _ in node.next_functions if path is not None]
            if len(others) != 1 or others[0].numel() != 1 or len(paths) != 1:
                return scale, False
            number = float(others[0].tolist())  # modes cannot take a tensor made of a number
            scale = scale * number if name == "MulBackward0" else scale / number
            node = paths[0]
        else:
            return scale, name in ("MeanBackward0", "MeanBackward1") or getattr(node, "_saved_reduction", 0) == 1
    return scale, False
