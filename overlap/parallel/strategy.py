"""The interface that all strategies share: newest weights by name, gradients in, steps that wait for nothing."""

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
from .awaitable_weights import awaitable
from .buckets.agreement import issue_check
from .buckets.gradients import check_gradient
from .memory_work import MemoryWork, users_frame
from .parameters import Parameters
from .settings import resolve_group
from .tree import Array, Names, Params, Site, flatten, rebuild

_STEPS = "overlap.parallel: steps"
"""Key in the memory of an epoch: steps of a model whose state cannot be made whole without a checkpoint."""


class Ahead:
    """The result of `model.step()`: `await` waits until the program is at most `ahead` steps ahead of its futures.

    Loops that would issue thousands of steps before the first has run should await it; short ones need not.

    Args:
        pending: Futures to wait for.
    """

    __slots__ = ("_pending",)

    def __init__(self, pending: Sequence[Future[object]]) -> None:
        self._pending = pending

    def __await__(self) -> Generator[object, object, None]:
        for future in self._pending:
            yield from future.__await__()


@hide_class_name
class Strategy(ABC, Generic[Params]):
    """A model under training by a group of ranks; the base of strategies, those of other packages too.

    A strategy says where weights live (`newest_weight`), what becomes of gradients (`take_gradients`), what a `step`
    issues, and what `finish` waits for.

    Args:
        rank: The rank that it runs on.
        params: Initial weights, as a tree of arrays with a name each.
        group: The ranks that train it; None for all.
        ahead: How many steps the program may be ahead of the futures that `limit_steps` is given.

    Raises:
        UsageError: The rank is not in the group, or a leaf of `params` is no array.

    Attributes:
        rank: The rank that it runs on.
        group: The ranks that train it.
        steps: How many `step` calls there have been.
    """

    rank: Rank
    group: Group
    steps: int

    def __init__(self, rank: Rank, params: Params, group: Group | None, ahead: int) -> None:
        self.rank, self.group, self.steps = rank, resolve_group(rank, group), 0
        self._names, self._work = Names(params), MemoryWork(rank)
        self._leaves = {name: (leaf.shape, leaf.dtype) for name, leaf in flatten(params).items()}
        self._ahead = ahead
        self._issued_steps: deque[Sequence[Future[object]]] = deque()

    def __getitem__(self, name: str) -> Awaitable[Array]:
        """Return the newest weight, or a future of it; of a part of the tree, a dict of them to pass to a compute.

        `await model["w"]` returns the array in either case, and for a part a dict of arrays.

        Raises:
            UsageError: If there is no such parameter.
        """
        weight: Awaitable[Array] = awaitable(self._names.find(name, self.newest_weight))
        return weight

    @abstractmethod
    def newest_weight(self, name: str) -> object:
        """Return the newest weight, or a future of it."""

    def reduce(self, name: str, grad: object) -> None:
        """Hand over a gradient, or a future of it; it travels as soon as its bucket is full.

        Args:
            name: Of the parameter, or of a part of the tree.
            grad: An array of the parameter's shape, or a future of one; for a part, a tree of them, or a future of one.
                It belongs to the model until the update: large gradients are sent from where they are.

        Raises:
            UsageError: If there is no such parameter, it has had its gradient in this step, or the gradient has another
                shape; at the await of a weight or of `finish`, if it is a future.
            NonFiniteError: There, if the gradient is not finite.
        """
        frame = _getframe(1)
        site = frame.f_code, frame.f_lasti
        gradients = dict(self._names.pairs(name, grad, site))
        for leaf, gradient in gradients.items():
            if not isinstance(gradient, Future):
                check_gradient(leaf, gradient, *self._leaves[leaf], self.steps + 1)
        self.take_gradients(gradients, site)

    @abstractmethod
    def take_gradients(self, gradients: Mapping[str, object], site: Site) -> None:
        """Take over gradients, or futures of them, by the names of their parameters.

        Args:
            gradients: Of the parameters that one `reduce` has named, checked if they are arrays.
            site: The line that has called `reduce`, for errors that come later.
        """

    def _duplicate_error(self, name: str) -> UsageError:
        """Return the error for a second gradient of a parameter in one step."""
        return UsageError(
            f"reduce: the gradient of {name!r} has been handed over in step {self.steps} already; of a weight "
            "that is used twice, add the gradients up and hand over the sum; or has model.step() been forgotten?"
        )

    def _record_first_step(self) -> None:
        """Count steps under `--survive`; refuse to restart a model whose earlier steps were lost.

        Raises:
            UsageError: A process was lost, and the model has been made anew without a checkpoint.
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
        """Let all weights make a step, once their gradients are there. Issues, and never waits."""

    def limit_steps(self, issued: Sequence[Future[object]]) -> Sequence[Future[object]]:
        """Record the futures of the newest step; return those that the program now waits for, for `Ahead`."""
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
        """Issue a comparison of names, shapes and dtypes of the parameters of all ranks."""
        items = [f"{name!r}, {dtype} {shape}," for name, (shape, dtype) in self._leaves.items()]
        return issue_check(self._work, self.group, "params", items)

    def _broadcast_first_weights(self, parameters: Parameters) -> list[Future[object]]:
        """Issue the comparison of parameters, and broadcasts of the first rank's weights."""
        if self.group.size == 1:
            return []
        issued: list[Future[object]] = [self._compare_params()]
        name = RoleName("first weights", "library")
        for flat in [weights.flat.view() for weights in parameters.weights.values()]:
            issued.append(self.group.broadcast(flat, out=flat, name=name, call_site=users_frame()))
        return issued
