"""The step without a barrier on the virtual clock, which is told what was measured of computes and of the wire."""

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import topology
from overlap import Virtual, run
from overlap.cli.bench.sampling import Times
from overlap.config import overriding_config
from overlap.simulation.compute_cost import Profile
from overlap.timeline.files.reading import read_trace
from overlap.timeline.spans import Timeline

from .network import Host
from .programs import traced_steps

STEPS = 15
_WARMUP = 3  # of these, which do not count

_MACHINE = """\
name = "two hosts"
devices = 2
[chip]
name = "host"
cores = 1
[wires]
shape = "full"
link = "neuronlink"
[links.neuronlink]
latency_s = {latency_s}
bandwidth_bytes_per_s = {bandwidth_bytes_per_s}
"""


def real_and_virtual_ns(hosts: Sequence[Host], alone: dict[int, Times]) -> tuple[float, float]:
    """Return the median step of one run, and that of its simulation.

    Args:
        hosts: Where it runs.
        alone: The times of two or more all-reduces by size, by which the wire is known.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace, machine = Path(folder, "real.json"), Path(folder, "hosts.toml")
        traced_steps(hosts, STEPS, trace)
        machine.write_text(_MACHINE.format(**_wire(alone)))
        return _step_ns(read_trace(trace)), _step_ns(_simulated(machine, Profile.read(trace)))


def _wire(alone: dict[int, Times]) -> dict[str, float]:
    """Return what two sizes say of a wire: among two ranks a ring sends all bytes once each way, in two steps."""
    small, large = min(alone), max(alone)
    small_s, large_s = alone[small].median_ns / 1e9, alone[large].median_ns / 1e9
    bandwidth = (large - small) / (large_s - small_s)
    return {"latency_s": max(0.0, (small_s - small / bandwidth) / 2), "bandwidth_bytes_per_s": bandwidth}


def _simulated(machine: Path, profile: Profile) -> Timeline:
    from .training import train_freely  # here, for it is also a program, which Python wants to import first

    timelines: list[Timeline] = []
    with overriding_config(watcher=timelines.append):
        run(train_freely, STEPS, ranks=2, cluster=topology.Cluster.load(machine), clock=Virtual(profile=profile))
    return timelines[0]


def _step_ns(timeline: Timeline) -> float:
    """Return the median time from one forward pass's end to the next one's, on rank 0."""
    ends = [span.end_ns for span in timeline.for_rank(0) if span.name == "differ"]
    return median(end - begun for begun, end in pairwise(sorted(ends)[_WARMUP:]))
