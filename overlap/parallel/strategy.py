"""The base class of strategies: read the newest weights by name, hand over gradients, make steps that never wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Generator, Mapping, Sequence
from sys import _getframe
from typing import Generic, cast

from ..errors import UsageError
from ..hints import hide_class_name
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from .awaitable_weights import make_awaitable
from .buckets.agreement import compare_items_of_ranks
from .buckets.gradients import check_gradient
from .memory_work import MemoryWork, users_frame
from .parameters import Parameters
from .settings import resolve_group
from .tree import Array, ParameterNames, Params, Site, flatten, rebuild

_STEPS = "overlap.parallel: steps"
"""Key in the memory of an epoch: number of steps of a model that can continue only from a checkpoint after a loss."""


class Ahead:
    """The result of `model.step()`: awaiting it keeps the program at most `ahead` steps ahead of its gradients.

    A loop that would otherwise issue thousands of steps before the first has run should await it.

    Args:
        pending: Futures to wait for: those of the step `ahead` steps ago.
    """

    __slots__ = ("_pending",)

    def __init__(self, pending: Sequence[Future[object]]) -> None:
        self._pending = pending

    def __await__(self) -> Generator[object, object, None]:
        for future in self._pending:
            yield from future.__await__()


@hide_class_name
class Strategy(ABC, Generic[Params]):
    """A model that a group of ranks trains: the base class of strategies, also for other packages.

    A subclass defines where weights are (`newest_weight`), what happens to gradients (`take_gradients`), what `step`
    issues, and what `finish` waits for.

    Args:
        rank: The rank that the model runs on.
        params: Initial weights: a dict, list or tuple of arrays, nested as you like.
        group: The ranks that train the model; None: all.
        ahead: Number of steps that the program may be ahead of the futures that are passed to `limit_steps`.

    Raises:
        UsageError: The rank is not in the group, or a leaf of `params` is no array.

    Attributes:
        rank: The rank that the model runs on.
        group: The ranks that train the model.
        steps: Number of `step` calls so far.
    """

    rank: Rank
    group: Group
    steps: int

    def __init__(self, rank: Rank, params: Params, group: Group | None, ahead: int) -> None:
        self.rank, self.group, self.steps = rank, resolve_group(rank, group), 0
        self._names, self._work = ParameterNames(params), MemoryWork(rank)
        self._leaves = {name: (leaf.shape, leaf.dtype) for name, leaf in flatten(params).items()}
        self._ahead = ahead
        self._issued_steps: deque[Sequence[Future[object]]] = deque()

    def __getitem__(self, name: str) -> Awaitable[Array]:
        """Return the newest weight, or a future of it; for a part of the tree, a dict of these.

        Pass the result to a compute, or await it: `await model["w"]` returns the array in either case, and for a part
        of the tree a dict of arrays.

        Raises:
            UsageError: There is no such parameter.
        """
        weight: Awaitable[Array] = make_awaitable(self._names.map_parameters(name, self.newest_weight))
        return weight

    @abstractmethod
    def newest_weight(self, name: str) -> object:
        """Return the newest weight, or a future of it."""

    def reduce(self, name: str, grad: object) -> None:
        """Hand over a gradient, or a future of one. The gradient travels as soon as its bucket is full.

        Args:
            name: Name of the parameter, or of a part of the tree.
            grad: For a parameter, an array of its shape, or a future of such an array. For a part of the tree, a tree
                of such arrays, or a future of the tree. The arrays belong to the model until the update, because large
                gradients are sent without a copy.

        Raises:
            UsageError: There is no such parameter, the parameter has had its gradient in this step, or the gradient
                has another shape. If the gradient is a future, a wrong shape is reported at the next await of a weight
                or of `finish`.
            NonFiniteError: At the await of a weight or of `finish`, if the gradient is not finite.
        """
        # The line that calls `reduce`: errors that come later name it.
        frame = _getframe(1)
        site = frame.f_code, frame.f_lasti
        gradients = dict(self._names.values_by_parameter(name, grad, site))
        for leaf, gradient in gradients.items():
            if not isinstance(gradient, Future):
                check_gradient(leaf, gradient, *self._leaves[leaf], self.steps + 1)
        self.take_gradients(gradients, site)

    @abstractmethod
    def take_gradients(self, gradients: Mapping[str, object], site: Site) -> None:
        """Take over the gradients of one call of `reduce`.

        Args:
            gradients: Gradients, or futures of them, by name of the parameter. Arrays have been checked.
            site: The line that has called `reduce`, for later errors.
        """

    def _count_or_refuse_step(self) -> None:
        """Under `--survive`, count steps, and refuse the first step of a model whose earlier steps were lost.

        The `UsageError` means that a process was lost, and the new model has not been restored from a checkpoint.
        """
        epoch = self.rank.epoch
        if not epoch.survives or epoch.survivor is not None:
            return
        made: int = epoch.memory.get(_STEPS, 0)
        if made and not self.steps:
            raise UsageError(
                f"{type(self).__name__}: its {made} steps are lost with a process, which alone had a part of the "
                "model; save one in some steps with Checkpoints(rank), whose folder is in memory under --survive, and "
                "let main begin with `await checkpoints.restore(model)`"
            )
        epoch.memory[_STEPS] = self.steps + 1

    @abstractmethod
    def step(self) -> Ahead:
        """End a step: issue what remains of it, so that all weights are updated once their gradients are averaged.

        Never waits itself. The returned awaitable waits only if the program is more than `ahead` steps ahead.
        """

    def limit_steps(self, issued: Sequence[Future[object]]) -> Sequence[Future[object]]:
        """Record the futures of the newest step; return those of the step `ahead` steps ago, to wait for.

        In the first `ahead` steps the result is empty.
        """
        self._issued_steps.append(issued)
        return self._issued_steps.popleft() if len(self._issued_steps) > self._ahead else []

    @abstractmethod
    async def finish(self) -> Params:
        """Wait until all updates are done; return the weights, in a tree like `params`."""

    def rebuild_tree(self, weights: Mapping[str, object]) -> Params:
        """Return weights by name as a tree like `params`."""
        return cast("Params", rebuild(self._names.form, weights))

    # -- first weights -------------------------------------------------------------------------------------------------

    def _compare_params(self) -> Future[None]:
        """Issue a comparison of parameters' names, shapes and dtypes; its future fails on all ranks if one differs."""
        # The message quotes the first item that differs: "'w', float32 (2,), here is something else there".
        items = [f"{name!r}, {dtype} {shape}," for name, (shape, dtype) in self._leaves.items()]
        same = "params must be the same on all ranks: they"
        return compare_items_of_ranks(self._work, self.group, same, items, name="compare params")

    def _broadcast_first_weights(self, parameters: Parameters) -> list[Future[object]]:
        """Issue the comparison of parameters, and the broadcasts of the first rank's weights into `parameters`.

        Returns the futures of all these; none in a group of one.
        """
        if self.group.size == 1:
            return []
        issued: list[Future[object]] = [self._compare_params()]
        name = RoleName("first weights", "library")
        for flat in [weights.flat.view() for weights in parameters.weights.values()]:
            issued.append(self.group.broadcast(flat, out=flat, name=name, call_site=users_frame()))
        return issued
