"""Errors, settings and results that travel: pickled and copied, they are as they were."""

import copy
import inspect
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest

import overlap
import topology
import transports
from overlap import errors
from overlap.config import RunConfig
from overlap.timeline import Timeline
from topology import Cluster, TopologyError
from transports import PlainSignature, TransportError
from transports.handshake import HandshakeError

# -- errors that travel: pickled, copied and raised in another process, with their fields, notes and causes ------------

ROOT = str(Path(__file__).parents[2])

_EXTRAS = ("overlap.torch", "overlap.ray")  # which change how this process pickles errors

for package in (overlap, topology, transports):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.startswith(_EXTRAS) and not module.name.endswith("__main__"):
            with suppress(ImportError):  # an extra that is not installed
                import_module(module.name)

_OF_TYPE: dict[str, object] = {
    "OSError": OSError(28, "No space left on device"),
    "str": "text",
    "int": 3,
    "bool": True,
    "int | None": 4,
    "float": 1.5,
    "float | None": 2.5,
    "str | None": "rule",
    "BaseException": ValueError("cause"),
    "dict[int, BaseException]": {5: KeyError("other")},
    "tuple[int, int]": (0, 1),
    "tuple[int, ...]": (0, 1, 2),
    "tuple[str, str]": ("a", "b"),
    "Sequence[str]": ("a", "b"),
    "Sequence[int]": (1, 2),
    "Sequence[tuple[int, ...]]": ((0, 1),),
    "Why": "silent",
    "PlainSignature": PlainSignature(7, b"text"),
}


def all_of(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """Yield a class and all that inherit from it, without those of tests."""
    if not kind.__module__.startswith("test"):
        yield kind
    for each in kind.__subclasses__():
        yield from all_of(each)


def made(kind: type[BaseException]) -> BaseException:
    """Return an error with a value for each of its arguments."""
    if kind.__init__ is Exception.__init__:
        return kind("text")
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    plain = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    named = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    return kind(*(_OF_TYPE[each.annotation] for each in plain), **{p.name: _OF_TYPE[p.annotation] for p in named})


def seen(error: BaseException | None) -> Any:
    """Return all that can be compared of an error."""
    if error is None:
        return None
    fields = {
        name: {key: seen(each) for key, each in value.items()} if isinstance(value, dict) else value
        for name, value in vars(error).items()
    }
    fields = {name: seen(value) if isinstance(value, BaseException) else value for name, value in fields.items()}
    return type(error), str(error), error.args, fields, seen(error.__cause__)


KINDS = sorted(
    {kind for base in (errors.OverlapError, TransportError, TopologyError) for kind in all_of(base)},
    key=lambda kind: f"{kind.__module__}.{kind.__name__}",
)


@pytest.mark.parametrize("travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_it_left(kind: type[BaseException], travel: Callable[[Any], Any]) -> None:
    error = made(kind)
    error.add_note("a note")
    if isinstance(error, errors.OverlapError):
        error.__cause__ = ValueError("its cause")
    assert seen(travel(error)) == seen(error)


def test_there_are_many_kinds() -> None:
    assert len(KINDS) > 20
    assert HandshakeError in KINDS


class Held(Exception):
    """Has a field that no process can send to another."""

    def __init__(self) -> None:
        super().__init__("held")
        self.lock = Lock()


def test_a_cause_that_cannot_travel_arrives_as_text() -> None:
    error = overlap.RankFailedError(
        rank=1, cause=Held(), where=" at a.py:1", doing=(), others={2: Held()}, world_size=3
    )
    error.__cause__ = error.cause
    got = pickle.loads(pickle.dumps(error))
    assert str(got) == str(error) == "rank 1 failed at a.py:1: Held: held; also failed: rank 2"
    for each in (got.cause, got.__cause__, got.others[2]):
        assert (type(each), each.type_name, str(each)) == (overlap.RemoteError, "Held", "held")


POOL = """
from concurrent.futures import ProcessPoolExecutor
import overlap

async def main(rank):
    await rank.barrier()
    if rank.rank == 1:
        raise ValueError("on purpose")

if __name__ == "__main__":
    with ProcessPoolExecutor(1) as pool:
        error = pool.submit(overlap.run, main, ranks=2).exception(60)
    print(type(error).__name__, error.rank, repr(error.cause))
"""


def test_a_pool_of_processes_raises_the_error_of_a_world(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    command = [sys.executable, str(tmp_path / "pool.py")]
    environ = os.environ | {"PYTHONPATH": ROOT}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("RankFailedError 1 ValueError('on purpose')\n", "")


# -- settings and results that travel: pickled and copied, they are as they were ---------------------------------------

PUBLIC = (
    "overlap", "topology", "transports", "overlap.parallel", "overlap.parallel.schedules", "overlap.timeline",
    "overlap.collectives",
)  # fmt: skip
# Files with records of simulations and prices, whose packages export nothing.
INNER = (
    *(f"overlap.simulation.{name}" for name in ("compute_cost", "conditions", "demand", "faults", "symmetry")),
    *(f"overlap.cost.{name}" for name in ("clocks", "parameters", "placed", "rounds")),
)
TRAVELS: list[Callable[[Any], Any]] = [lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy]
travels = pytest.mark.parametrize("travel", TRAVELS, ids=["pickle", "copy", "deepcopy"])


def public_records() -> list[type[Any]]:
    """Return all public dataclasses, and those of `INNER`."""
    values = [getattr(module, name) for module in map(import_module, PUBLIC) for name in module.__all__]
    values += [
        value
        for module in map(import_module, INNER)
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
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
    return RunConfig.from_values(
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
