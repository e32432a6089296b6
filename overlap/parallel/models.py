"""Several models as one: in a mixture of experts, the experts' gradients are averaged over fewer ranks than others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError
from .tree import paths_by_name

if TYPE_CHECKING:
    from collections.abc import Awaitable


class TrainableModel(Protocol):
    """A model under training, such as `DataParallel` or `Sharded`. Any object with these four methods is one."""

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it."""

    def reduce(self, name: str, grad: object) -> None:
        """Take over a gradient of the parameter `name`, or a future of it."""

    def step(self) -> object:
        """Issue the update."""

    def finish(self) -> Awaitable[object]:
        """Wait for all updates; return the weights."""


class Models:
    """Several models with the interface of one; each parameter belongs to exactly one of the models.

        here = parallel.DataParallel(rank, experts, optimizer=adam, group=mesh["edp"])
        rest = parallel.DataParallel(rank, others, optimizer=adam)
        model = parallel.Models((here, experts), (rest, others))

    Args:
        models: Pairs of a model and the tree of parameters that it was made with.

    Raises:
        UsageError: Two models have a parameter of the same name.
    """

    def __init__(self, *models: tuple[TrainableModel, object]) -> None:
        self._models = [model for model, _ in models]
        self._model_by_name: dict[str, TrainableModel] = {}
        for model, params in models:
            for name in paths_by_name(params):
                if name in self._model_by_name:
                    raise UsageError(f"models: two of them have a parameter {name!r}; rename one")
                self._model_by_name[name] = model

    def __getitem__(self, name: str) -> object:
        """Return the newest weight, or a future of it."""
        return self._find_model(name)[name]

    def reduce(self, name: str, grad: object) -> None:
        """Hand a gradient over to the model that has the parameter. See `Strategy.reduce`.

        Raises:
            UsageError: No model has a parameter of that name.
        """
        self._find_model(name).reduce(name, grad)

    def step(self) -> list[object]:
        """Call `step` on each model; return the results in the order of the models."""
        return [model.step() for model in self._models]

    async def finish(self) -> list[object]:
        """Wait until all updates are done; return the weights of each model, in the order of the models."""
        return [await model.finish() for model in self._models]

    def _find_model(self, name: str) -> TrainableModel:
        """Return the model that has a parameter; raise a `UsageError` if none has it."""
        if name not in self._model_by_name:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._model_by_name)}")
        return self._model_by_name[name]
