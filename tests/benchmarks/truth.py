"""One truth: how far a simulation is from the program that it simulates.

Two comparisons over wires that are paced in real time, each of a training loop that reduces the gradient of one layer
while another is computed: with stated computes, run and simulated with the same figures of wires; and a measured trace,
replayed with the figures that were measured of the wires.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np

import topology
from overlap import Rank, Virtual, run
from overlap.cli.bench.sampling import Sampling, Times
from overlap.config import overriding_config
from overlap.simulation.compute_cost import Profile
from overlap.timeline.spans import Timeline
from tests.benchmarks.figures import few
from transports import LinkSpeed, NeuronLink, Paced

from .figures import Figure

RANKS, LAYERS, STEPS = 4, 4, 5
ELEMENTS = 8192
# A message of a gradient's quarter takes 41 ms, against a millisecond by which Trio may wake up late.
SPEED = LinkSpeed(latency_s=0.001, bandwidth_bytes_per_s=2e5)
BACKWARD_S, UPDATE_S = 0.07, 0.005
PROBED = (0, ELEMENTS)  # elements of the messages by which wires are measured
AIM = 0.95  # of the longer step, the shorter one

_MACHINE = """\
name = "paced"
devices = {ranks}
[chip]
name = "core"
cores = 1
[wires]
shape = "full"
link = "neuronlink"
[links.neuronlink]
latency_s = {latency_s}
bandwidth_bytes_per_s = {bandwidth_bytes_per_s}
"""


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure and simulate; text is a remark."""
    yield f"{RANKS} ranks, {LAYERS} layers; the median step of {STEPS}, the first left out"
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "real.json")
        for name, text, compared in (
            ("stated", "computes and wires as stated", _stated),
            ("replayed", "a trace replayed, wires as measured", _replayed),
        ):
            yield _figure(name, text, [compared(trace) for _ in range(few(sampling))], AIM)


def _figure(name: str, text: str, pairs: list[tuple[float, float]], aim: float) -> Figure:
    """Make a line of pairs of seconds, measured and simulated: how near they come, in the median."""
    near = median(min(pair) / max(pair) for pair in pairs)
    times = Times.of_samples([measured * 1e9 for measured, _ in pairs])
    return Figure(name=f"truth/{name}", text=text, value=near, unit="ratio", aim=aim, times=times)


def _stated(trace: Path) -> tuple[float, float]:
    measured = _really(trace)
    return _step_s(measured), _step_s(_simulated(_cluster(SPEED), None))


def _replayed(trace: Path) -> tuple[float, float]:
    measured = _really(trace)
    return _step_s(measured), _step_s(_simulated(_cluster(_measured_speed()), Profile.read(trace)))


def _step_s(timeline: Timeline) -> float:
    """Return the median step of rank 0, the first left out: it compiles the schedule."""
    steps = [span.duration_ns for span in timeline.for_rank(0) if span.kind == "step" and span.step]
    return median(steps) / 1e9


# -- the program -------------------------------------------------------------------------------------------------


async def _train(rank: Rank, work: bool) -> None:
    for step in range(STEPS):
        with rank.step(step):
            pending = []
            for layer in range(LAYERS):
                grad = rank.compute(_backward, work, name=f"backward {layer}", seconds=BACKWARD_S)
                pending.append(rank.all_reduce(grad, op="mean"))
            for layer, reduced in enumerate(pending):
                last = rank.compute(_update, reduced, work, name=f"update {layer}", seconds=UPDATE_S)
            await last


def _backward(work: bool) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    if work:
        sleep(BACKWARD_S)
    return np.ones(ELEMENTS, np.float32)


def _update(_: object, work: bool) -> None:
    if work:
        sleep(UPDATE_S)


def _transport() -> Paced:
    return Paced(NeuronLink(RANKS), links=lambda src, dst: SPEED)


def _really(trace: Path) -> Timeline:
    timelines: list[Timeline] = []
    with overriding_config(watcher=timelines.append):
        run(_train, True, ranks=RANKS, cluster=_cluster(SPEED), transport=_transport(), trace=trace)
    return timelines[0]


def _simulated(cluster: topology.Cluster, profile: Profile | None) -> Timeline:
    timelines: list[Timeline] = []
    with overriding_config(watcher=timelines.append):
        run(_train, False, ranks=RANKS, cluster=cluster, clock=Virtual(profile=profile))
    return timelines[0]


# -- the wires ---------------------------------------------------------------------------------------------------


def _cluster(speed: LinkSpeed) -> topology.Cluster:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "paced.toml")
        figures = {"latency_s": speed.latency_s, "bandwidth_bytes_per_s": speed.bandwidth_bytes_per_s}
        file.write_text(_MACHINE.format(ranks=RANKS, **figures))
        return topology.Cluster.load(file)


async def _probe(rank: Rank, elements: int) -> float:
    """Send messages to and fro between ranks 0 and 1; return the median of one way."""
    if rank.rank > 1:
        return 0.0
    x, times = np.zeros(elements, np.float32), []
    for _ in range(8):
        begun_s = perf_counter()
        for turn in range(2):
            await (rank.send(x, 1 - turn) if rank.rank == turn else rank.recv(x, turn))
        times.append((perf_counter() - begun_s) / 2)
    return median(times)


def _measured_speed() -> LinkSpeed:
    """Return what two sizes of messages say of a wire."""
    small_s, large_s = (
        run(_probe, elements, ranks=RANKS, cluster=_cluster(SPEED), transport=_transport())[0] for elements in PROBED
    )
    nbytes = ELEMENTS * np.dtype(np.float32).itemsize
    return LinkSpeed(latency_s=small_s, bandwidth_bytes_per_s=nbytes / (large_s - small_s))
