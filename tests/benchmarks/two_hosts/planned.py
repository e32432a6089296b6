"""Whether plans name the fastest algorithm between two hosts, one rank or two on each."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import topology
from overlap.cli.bench.sampling import Sampling

from .. import algorithms
from ..figures import Figure
from .network import HostsUnavailableError, two_hosts
from .programs import begun

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
MACHINE = Path(__file__).with_name("hosts.toml")
SIZES_BYTES = tuple(16 << 10 << power for power in range(0, 11, 2))
BITS_PER_S = 10**9


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure each collective by each algorithm; text is a remark, such as that a tool is missing."""
    try:
        with two_hosts(links=1, bits_per_s=BITS_PER_S) as hosts:
            for ranks in (1, 2):
                cluster = topology.cluster(str(MACHINE), nodes=len(hosts), ranks=ranks * len(hosts))
                options = ["--ranks-per-process", str(ranks), "--cluster", str(MACHINE)]
                place = f"2 hosts x {ranks}, 1 Gbit/s"
                begin = partial(begun, hosts, options)
                name = f"two_hosts/planned/{ranks}"
                yield from algorithms.regrets(name, place, OPERATIONS, SIZES_BYTES, cluster, sampling, begin)
    except HostsUnavailableError as reason:
        yield str(reason)
