"""Data of a collection: its partitions go to the ranks on the workers that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import distributed

from ..errors import UsageError


def compute_partitions(data: object, client: distributed.Client) -> list[distributed.Future]:
    """Return the partitions of a collection, or of futures, in order, once all are computed on the cluster."""
    import dask

    if dask.is_dask_collection(data):
        futures = distributed.futures_of(client.persist(data))
    elif isinstance(data, Sequence) and all(isinstance(future, distributed.Future) for future in data):
        futures = list(data)
    else:
        raise UsageError(f"data: expected a Dask collection or a sequence of futures, got {type(data).__name__}")
    distributed.wait(futures)
    for future in futures:
        if future.status == "error":
            future.result()  # raises what the computation has raised
    return list(futures)


def holders(partitions: Sequence[distributed.Future], client: distributed.Client) -> list[list[str]]:
    """Return the workers that hold each partition."""
    held: Mapping[str, Any] = client.who_has(list(partitions))
    return [list(held.get(future.key, ())) for future in partitions]


def assign_partitions(held: Sequence[Sequence[str]], workers: Sequence[str], ranks_each: int) -> list[list[list[int]]]:
    """Assign each partition to a worker that holds it, else to the one with the fewest; return them by worker and rank.

    `held` has the workers that hold each partition, `workers` those of the gang.

    >>> assign_partitions([["a"], ["a"], ["b"], [], ["a", "b"]], ["a", "b"], 1)
    [[[0, 1]], [[2, 3, 4]]]
    """
    of_worker: dict[str, list[int]] = {worker: [] for worker in workers}
    unplaced = [number for number, having in enumerate(held) if not any(worker in of_worker for worker in having)]
    for number in [*(n for n in range(len(held)) if n not in unplaced), *unplaced]:
        candidates = [worker for worker in held[number] if worker in of_worker] or list(workers)
        of_worker[min(candidates, key=lambda worker: len(of_worker[worker]))].append(number)
    return [[sorted(of_worker[worker])[rank::ranks_each] for rank in range(ranks_each)] for worker in workers]
