"""Several models as one: of a mixture of experts, some weights are averaged over other ranks than the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError
from .tree import leaves

if TYPE_CHECKING:
    from collections.abc import Awaitable


class TrainableModel(Protocol):
    """A model under training, such as `DataParallel` or `Sharded`; write your own by having these four."""

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it."""

    def reduce(self, name: str, grad: object) -> None:
        """Take over a gradient."""

    def step(self) -> object:
        """Issue the update."""

    def finish(self) -> Awaitable[object]:
        """Wait for all updates; return the weights."""


class Models:
    """Models with the interface of one; each parameter belongs to one of them.

        here = parallel.DataParallel(rank, experts, optimizer=adam, group=mesh["edp"])
        rest = parallel.DataParallel(rank, others, optimizer=adam)
        model = parallel.Models((here, experts), (rest, others))

    Args:
        models: Each with the tree of parameters that it was made of.

    Raises:
        UsageError: If two of them have a parameter of the same name.
    """

    def __init__(self, *models: tuple[TrainableModel, object]) -> None:
        self._models = [model for model, _ in models]
        self._home: dict[str, TrainableModel] = {}
        for model, params in models:
            for name in leaves(params):
                if name in self._home:
                    raise UsageError(f"models: two of them have a parameter {name!r}; rename one")
                self._home[name] = model

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it."""
        return self._find_model(name)[name]

    def reduce(self, name: str, grad: object) -> None:
        """Hand a gradient over to the model that has the parameter."""
        self._find_model(name).reduce(name, grad)

    def step(self) -> list[object]:
        """Let all of them make a step; return the results of their `step`."""
        return [model.step() for model in self._models]

    async def finish(self) -> list[object]:
        """Wait until all updates of all of them are done; return the weights of each, in their order."""
        return [await model.finish() for model in self._models]

    def _find_model(self, name: str) -> TrainableModel:
        if name not in self._home:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._home)}")
        return self._home[name]
