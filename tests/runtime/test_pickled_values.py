"""Settings and results that travel: pickled and copied, they are as they were."""

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlap
import topology
from overlap.config import RunConfig
from overlap.timeline import Timeline
from topology import Cluster

PUBLIC = (
    "overlap", "topology", "transports", "overlap.parallel", "overlap.parallel.schedules", "overlap.timeline",
    "overlap.simulation", "overlap.cost", "overlap.collectives",
)  # fmt: skip
TRAVELS: list[Callable[[Any], Any]] = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]
travels = pytest.mark.parametrize("travel", TRAVELS, ids=["pickle", "copy", "deepcopy"])


def public_records() -> list[type[Any]]:
    """Return all public dataclasses."""
    values = [getattr(module, name) for module in map(import_module, PUBLIC) for name in module.__all__]
    found = {each for each in values if inspect.isclass(each) and is_dataclass(each)}
    return sorted(found, key=lambda kind: kind.__name__)


RECORDS = public_records()


def test_there_are_many_records() -> None:
    assert len(RECORDS) > 40
    assert {overlap.Conditions, overlap.Faults, overlap.Virtual, Cluster, Timeline} <= set(RECORDS)


@travels
@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_arrives_with_all_its_fields(kind: type[Any], travel: Callable[[Any], Any]) -> None:
    """Whatever they hold: the values here are none that its checks would let pass."""
    record = object.__new__(kind)
    for number, field in enumerate(fields(kind)):
        object.__setattr__(record, field.name, number)
    got = travel(record)
    assert type(got) is kind
    assert {field.name: getattr(got, field.name) for field in fields(kind)} == {
        field.name: number for number, field in enumerate(fields(kind))
    }


def config() -> RunConfig:
    return RunConfig.given(
        ranks=4, trace=Path("run.json"), cluster=topology.cluster("trn1.32xlarge", nodes=2), nnodes=4,
        rails=("eth0", "eth1"), timeout_s=2.5, check="nan", virtual=overlap.Virtual(conditions=overlap.Conditions()),
    )  # fmt: skip


VALUES: dict[str, Callable[[], object]] = {
    "settings": config,
    "an UltraServer": lambda: topology.cluster("trn2u.48xlarge"),
    "the local machine": lambda: topology.cluster("local", ranks=3),
    "conditions": lambda: overlap.Conditions(seed=3),
    "faults": overlap.Faults,
    "virtual time": overlap.Virtual,
    "interference": overlap.Interference,
}


@travels
@pytest.mark.parametrize("name", VALUES)
def test_a_configuration_arrives_as_it_left(name: str, travel: Callable[[Any], Any]) -> None:
    value = VALUES[name]()
    got = travel(value)
    assert got == value
    assert repr(got) == repr(value)
    if isinstance(value, RunConfig):
        assert got.sources == value.sources


async def work(rank: overlap.Rank) -> list[object]:
    with rank.step(3):
        reduced = await rank.all_reduce(np.arange(5.0), name="grads")
        computed = await rank.compute(np.sum, reduced)
        told = await rank.all_gather(np.array([rank.rank], np.int32))
        tree = await rank.all_reduce({"a": np.ones(2), "b": [np.ones(1)]})
    return [reduced, computed, told, tree, rank.statistics()]


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return overlap.run(work, ranks=2)[1]


@travels
def test_results_of_futures_arrive_as_they_left(results: list[Any], travel: Callable[[Any], Any]) -> None:
    reduced, computed, told, tree, statistics = travel(results)
    assert reduced.tolist() == [0, 2, 4, 6, 8]
    assert computed == 20
    assert told.tolist() == [0, 1]
    assert (tree["a"].tolist(), tree["b"][0].tolist()) == ([2, 2], [2])
    assert statistics == results[4]
