"""What `python -m tests.benchmarks simulation` measures: the same work on both sides, and every figure once."""

import json

import pytest

import topology
from overlap.cli.bench.sampling import Sampling
from overlap.simulation.fabric import SimulatedFabric
from tests.benchmarks import simulation
from tests.benchmarks.figures import Figure


@pytest.mark.parametrize(("tasks", "rounds"), [(1, 3), (2, 5), (7, 4)])
def test_both_rings_take_the_same_virtual_time(tasks, rounds):
    pytest.importorskip("simpy", reason="SimPy is optional: pip install simpy")
    took_ns = rounds * simulation.HOP_NS
    assert simulation.ring(tasks, rounds) == simulation.simpy_ring(tasks, rounds) == took_ns


def test_a_ring_of_ours():
    assert simulation.ring(5, 6) == 6 * simulation.HOP_NS


def test_traffic_goes_on_until_the_slowest_is_done(monkeypatch):
    fabric = SimulatedFabric(topology.cluster("trn2.48xlarge"))
    slowest_ns = max(
        fabric.message_transfer((), src, (src + 1) % 64, simulation.MESSAGE_BYTES).alone_ns for src in range(64)
    )
    monkeypatch.setattr(simulation, "SENDERS", 64)
    for sent in (1, 3):
        monkeypatch.setattr(simulation, "ROUNDS", sent)
        assert simulation.traffic() == sent * slowest_ns


@pytest.mark.parametrize("alike", ["0", "1"])
def test_a_world_tells_time_and_memory(capsys, monkeypatch, alike):
    monkeypatch.setattr(simulation, "COLLECTIVES", 2)
    simulation.main("64", alike)
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"wall_ns", "peak_bytes"}
    assert told["wall_ns"] > 0
    assert told["peak_bytes"] > 10 << 20  # no interpreter is smaller


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_every_figure(monkeypatch, installed):
    for name, value in {"TASKS": 3, "ROUNDS": 2, "SENDERS": 64, "SENT": 1}.items():
        monkeypatch.setattr(simulation, name, value)
    told = {"wall_ns": 7e9, "peak_bytes": 1 << 31}
    monkeypatch.setattr(simulation, "start", lambda options, program: program)
    monkeypatch.setattr(simulation, "read_json_lines", lambda programs: [told | {"program": programs[0]}])
    monkeypatch.setattr(simulation, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(simulation, "simpy_ring", lambda: None)
    monkeypatch.setattr(simulation, "ring_costing_s", lambda: (0.01, 0.02))
    found = list(simulation.figures(Sampling(iters=1)))
    figures = {figure.name: figure for figure in found if isinstance(figure, Figure)}
    others = ["message/simpy"] if installed else []
    worlds = ["world/1024", "world/4096", "world/4096/alike"]
    names = ["message", *others, "message/traffic", "message/program", *worlds, "cost"]
    assert list(figures) == [f"simulate/{name}" for name in names]
    assert [figures[f"simulate/{name}"].met for name in ("world/1024", "world/4096", "cost")] == [True] * 3
    assert figures["simulate/cost"].value == 10e6
    assert ("simpy is not installed: pip install simpy" in found) is not installed
    assert "  at most 2 GiB of memory, aim 1 GiB: missed" in found
