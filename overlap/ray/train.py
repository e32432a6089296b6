"""Backend of Ray Train: every worker of a `DataParallelTrainer` is a rank.

    from overlap.ray.train import OverlapConfig, connection

    def loop():
        total = connection().rank.all_reduce(np.ones(8)).result()

    DataParallelTrainer(loop, backend_config=OverlapConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()

Ray 2.60: `pip install ".[ray-train]"` pins it, because Ray marks `Backend` as `DeveloperAPI`. The backend here uses
what Ray's own backends use: `on_start`, `train_func_context`, and `execute` of the group of workers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train.backend import Backend, BackendConfig

from ..embedded.connection import Connection
from ..embedded.door import connect
from ..errors import UsageError
from .actors import store

__all__ = ["OverlapConfig", "connection"]


@dataclass
class _Own:
    """The part of this process in a group of workers."""

    meeting: str = ""  # Name of the group's store, new at every start of the group
    connection: Connection | None = None


_own = _Own()


def connection() -> Connection:
    """Return the connection of this worker of Ray Train, whose `rank` any thread may use.

    Raises:
        UsageError: Outside of the training function of a trainer with `OverlapConfig`.
    """
    if _own.connection is None:
        raise UsageError(
            "connection: call it in the training function of a trainer that has backend_config=OverlapConfig()"
        )
    return _own.connection


class OverlapConfig(BackendConfig):  # type: ignore[misc]
    """Makes every worker of a `DataParallelTrainer` a rank, from the beginning of the training function to its end.

    A rank that fails is named on all others, whose training functions end with it. Ray Train then starts the group
    again, if its `FailureConfig` says so.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend that tells workers where they meet."""
        return _Meeting

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context in which each worker calls the training function."""
        return _connected


class _Meeting(Backend):  # type: ignore[misc]
    """Tells the workers of a group, at each start of the group, the name of the store in which they meet."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        worker_group.execute(_meet_in, f"train/{secrets.token_hex(8)}")


def _meet_in(name: str) -> None:
    _own.meeting = name


@contextmanager
def _connected() -> Iterator[None]:
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    with connect(rank, size, store=store(_own.meeting)) as _own.connection:
        try:
            yield
        finally:
            _own.connection = None
