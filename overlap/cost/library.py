"""Algorithms of the machine's own library, priced by the library's own model.

A price is the launch, the latency of the hops, and the bytes on the busiest wires. A ring is in step with itself, and a
chain sends pieces far shorter than its data, so the three add up. Trees and sums in switches are pipelines of pieces
of the library's size: the first piece passes all stages, one after the other, and the others follow it at the
pace of the busiest wires. Where the library's pieces are not known, they have the best size: with a latency `l` through
all stages and `b` of bytes on the wires that takes ``l + b + 2 sqrt(l b)``, the optimum of
``(stages + pieces - 1) (start + bytes / pieces)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, inf, log2, sqrt

import numpy as np

from topology import Library, LibraryAlgorithm, Protocol

from ..collectives.placement import Floats, Ints, Placement
from .flat import PlanRequest
from .geometry import Geometry
from .option import Formula, FormulaTerms, Rejected
from .parameters import CostParameters
from .phase import PricedPhase
from .placed import on
from .rounds import Round, Rounds

_PIPELINES = ("tree", "switch", "switch_tree", "fabric")
_MANY = 4  # nodes from which on `chunk_from_four_nodes` holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The time of a protocol of an algorithm on a group, for any number of bytes."""

    latency_s: float  # time of an operation without bytes
    inside: float  # bytes on the busiest wire inside a node, for each byte of the vector
    between: float  # bytes that leave the busiest node, for each byte of the vector
    s_per_byte: float  # time of a byte of the vector, on the busiest wires
    steps: int  # hops one after the other
    piped: bool  # whether it is a pipeline of pieces
    through_s_per_byte: float = 0.0  # time of a piece through all stages of the pipeline, one after the other
    # (bytes in flight at once, least bytes of a vector that is cut so), the largest first
    pieces: tuple[tuple[float, float], ...] = ()

    def terms(self, launch_s: float, nbytes: float) -> FormulaTerms:
        """Return the terms of the time of an operation."""
        return FormulaTerms(launch_s, self.latency_s, self.s_per_byte * nbytes, self._filling_s(nbytes))

    def _filling_s(self, nbytes: float) -> float:
        """Return the time that a pipeline loses to its filling and to the starts of its pieces."""
        if not self.piped:
            return 0.0
        if not self.pieces:
            return 2 * sqrt(self.latency_s * self.s_per_byte * nbytes)
        piece = next(size for size, least in self.pieces if nbytes >= least)
        return max(self.through_s_per_byte - self.s_per_byte, 0.0) * min(piece, nbytes)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group on a machine, for a library."""

    library: Library
    geometry: Geometry
    parameters: CostParameters
    operation: str

    @cached_property
    def nodes(self) -> int:
        return len(self.geometry.nodes)

    @cached_property
    def on_a_node(self) -> int:
        """Ranks on the fullest node."""
        return max(len(node) for node in self.geometry.nodes)

    def why_not(self, model: LibraryAlgorithm) -> str | None:
        """Return why an algorithm does not apply; None if it does."""
        alone = self.on_a_node == 1
        if self.geometry.size < 2:
            return "a single rank sends nothing"
        if model.name in self.library.without:
            return "the machine's settings switch it off"
        if model.nodes == "one" and self.nodes > 1:
            return "it is for one node"
        if model.nodes in ("several", "alone") and self.nodes == 1:
            return "it is for several nodes"
        if model.nodes == "alone" and not alone:
            return "it is for nodes of one rank"
        if self.on_a_node < model.least_ranks:
            return f"it needs {model.least_ranks} ranks on a node"
        chips = self.library.of_chips()
        if model.shape in ("switch", "switch_tree", "fabric") and (chips is None or chips.switch_share is None):
            return "the switch of a node does not sum"
        fabric = self.geometry.cluster.machine.fabric
        if model.shape == "fabric" and not (fabric and fabric.sums):
            return "the network's switches do not sum"
        return None

    def carries(self, protocol: Protocol) -> bool:
        """Return whether a protocol runs over the wires of the group."""
        allowed = self.library.protocols_between
        return self.nodes == 1 or not allowed or protocol.kind in allowed

    def way(self, model: LibraryAlgorithm, protocol: Protocol) -> Way:
        """Return the way of an algorithm with a protocol over the group: its steps, loads on wires, and times."""
        ranks, nodes, local = self.geometry.size, self.nodes, self.on_a_node
        far_s = protocol.between_s + protocol.waits * self._network_s
        depth = ceil(log2(nodes))
        passes = (2 if self.operation == "all_reduce" else 1) * (ranks - 1) / ranks
        near_s, latency_s = protocol.inside_s, protocol.base_s
        if model.shape == "ring":
            hops = round(passes * ranks)
            borders = min(hops, round(passes * ranks / (ranks - 1)) * nodes) if nodes > 1 else 0
            processors = self.library.of_processors()
            posts_s = protocol.posts * processors.post_s if processors and nodes > 1 else 0.0
            latency_s += (hops - borders) * max(near_s, posts_s) + borders * far_s
            latency_s *= protocol.plateau if nodes > 1 and self.operation == "all_reduce" else 1.0
            inside, between = passes, passes
        elif model.shape == "pat":
            hops, latency_s = depth, latency_s + depth * far_s + ranks * near_s
            inside, between = 0.0, passes
        elif model.shape == "chain":
            hops, latency_s = ranks - 1, latency_s + (ranks - nodes) * near_s + (nodes - 1) * far_s
            inside, between = 1.0, 1.0
        elif model.shape == "tree":
            hops = 2 * (local - 1 + depth)
            latency_s += 2 * ((local - 1) * near_s + depth * far_s)
            # Up and down each wire once; of two trees a node is a leaf of one and passes on in the other.
            inside, between = 2.0, 1.0 if nodes == 2 else 2.0
        else:
            # A switch's sum comes from all and goes to one; its broadcast comes from one and goes to all.
            inside, between = (local + 1) / local, 2.0 if model.shape == "switch_tree" and nodes > 2 else 1.0
            hops = {"switch": 2, "fabric": 4}.get(model.shape, 2 + 2 * depth)
            latency_s += near_s + {"switch": 0, "fabric": 1}.get(model.shape, 2 * depth) * far_s
        between = between if nodes > 1 else 0.0
        s_per_byte = self._s_per_byte(model, protocol, inside, between)
        return Way(
            latency_s=latency_s,
            inside=inside,
            between=between,
            s_per_byte=s_per_byte,
            steps=hops,
            piped=model.shape in _PIPELINES,
            through_s_per_byte=self._through_s_per_byte(model, protocol, between, s_per_byte),
            pieces=self._pipeline_pieces(model, protocol),
        )

    def _through_s_per_byte(
        self, model: LibraryAlgorithm, protocol: Protocol, between: float, s_per_byte: float
    ) -> float:
        """Return the time of a piece through all stages, for each of its bytes."""
        depth = ceil(log2(self.nodes))
        if model.shape != "tree":  # into the switch's buffers, the sum, out of them; and between nodes up and down
            return (3 + 2 * {"switch": 0, "fabric": 1}.get(model.shape, depth)) * s_per_byte
        inside_s = 2 * (self.on_a_node - 1) / (self._inside_bytes_per_s * protocol.share)
        return inside_s + depth * between / (self._between_bytes_per_s * protocol.share)

    def _pipeline_pieces(self, model: LibraryAlgorithm, protocol: Protocol) -> tuple[tuple[float, float], ...]:
        """Return the pieces of a pipeline, in the form of `Way.pieces`; none if they are not known."""
        chips, chunk = self.library.of_chips(), self.library.chunk
        if model.shape == "tree" and chunk is not None:
            channels = self.library.channels_of_rail * self._fewest_bundles
            return ((float((protocol.chunk_bytes or chunk) * channels), 0.0),)
        if model.chunks and chips is not None:
            channels = chips.switch_channels if self.nodes == 1 else chips.switch_channels_between
            largest = model.chunk_from_four_nodes if self.nodes >= _MANY else None
            rounds = [
                (channels * self.on_a_node * size, times) for size, times in model.chunks if size <= (largest or size)
            ]
            return tuple((float(piece), float(piece * times)) for piece, times in rounds)
        return ()

    @cached_property
    def _fewest_bundles(self) -> int:
        """Number of adapter bundles of the group in a node, in the node with the fewest."""
        g = self.geometry
        return min(len({g.cluster.nic_of(g.ranks[index]) for index in node}) for node in g.nodes)

    def _s_per_byte(self, model: LibraryAlgorithm, protocol: Protocol, inside: float, between: float) -> float:
        """Return the time per byte by the slowest limit: wires in a node, network, or low-latency protocol."""
        chips, processors = self.library.of_chips(), self.library.of_processors()
        share = protocol.share
        in_switch = chips.switch_share if chips and model.shape in ("switch", "switch_tree", "fabric") else None
        times = [inside / (self._inside_bytes_per_s * share * (in_switch or 1.0))]
        if self.nodes > 1:
            times.append(between / (self._between_bytes_per_s * share))
        if protocol.low_latency:
            rate = chips.low_latency_bytes_per_s if chips else inf
            if self.nodes > 1 and processors:
                two, more = processors.low_latency_bytes_per_s, processors.low_latency_beyond_two_bytes_per_s
                rate = two if self.nodes == 2 else more
            times.append(max(inside, between) / rate)
        return max(times)

    def _wire_efficiency(self, kind: str) -> float:
        return dict(self.parameters.efficiency).get(kind, 1.0)

    @cached_property
    def _network_s(self) -> float:
        """Latency of the network; none inside a node."""
        cluster = self.geometry.cluster
        network = cluster.machine.network
        return cluster.latency_s(network.link) if self.nodes > 1 and network else 0.0

    @cached_property
    def _inside_bytes_per_s(self) -> float:
        """Rate of the wires of a rank inside its node."""
        cluster, link = self.geometry.cluster, self.geometry.cluster.machine.wires.link
        return cluster.bandwidth_bytes_per_s(link) * self._wire_efficiency(link)

    @cached_property
    def _between_bytes_per_s(self) -> float:
        """Rate of all adapters of the group in a node, in the node with the fewest."""
        g, fewest = self.geometry, self._fewest_bundles
        network = g.cluster.machine.network
        assert network is not None
        bundle = g.cluster.bandwidth_bytes_per_s(network.link) * g.cluster.nics_per_bundle
        return fewest * bundle * self._wire_efficiency(network.link)


def _wire_loads(g: Geometry, way: Way) -> Rounds:
    """Return messages with the load of an algorithm on wires: around each node, and from node to node."""
    none = np.zeros(g.size)
    rounds = []
    for pairs, sent in (_messages_in_nodes(g, way.inside), _messages_between_nodes(g, way.between)):
        if len(pairs) and sent.any():
            order = np.argsort(pairs[:, 1], kind="stable")
            src, dst = pairs[order].T
            rounds.append(
                Round(
                    repeat=1, src=src, dst=dst, sent=sent[order], added=none, local_added=none, moving=none,
                    adding=none, local=none,
                )
            )  # fmt: skip
    return Rounds(size=g.size, slots=1, rounds=tuple(rounds))


def _messages_in_nodes(g: Geometry, load: float) -> tuple[Ints, Floats]:
    """Return messages from each rank to the next in its node, in a ring, with `load` bytes per byte of the vector."""
    pairs = [pair for node in g.nodes if len(node) > 1 for pair in zip(node, (*node[1:], node[0]), strict=True)]
    return np.array(pairs, np.int64).reshape(-1, 2), np.full(len(pairs), load)


def _messages_between_nodes(g: Geometry, load: float) -> tuple[Ints, Floats]:
    """Return the messages from each node to the next, `load` bytes in all, spread over all its ranks."""
    pairs, sent = [], []
    if len(g.nodes) > 1:
        for senders, receivers in zip(g.nodes, (*g.nodes[1:], g.nodes[0]), strict=True):
            count = max(len(senders), len(receivers))
            load_of: dict[tuple[int, int], float] = {}
            for number in range(count):
                pair = senders[number % len(senders)], receivers[number % len(receivers)]
                load_of[pair] = load_of.get(pair, 0.0) + load / count
            pairs += list(load_of)
            sent += list(load_of.values())
    return np.array(pairs, np.int64).reshape(-1, 2), np.array(sent)


def library_options(
    request: PlanRequest, placement: Placement, parameters: CostParameters
) -> tuple[list[Formula], list[Rejected]]:
    """Price every algorithm that the machine's own library has for a collective.

    Returns:
        Options that apply, and the reasons of the other algorithms.
    """
    library = request.geometry.cluster.machine.collectives.library
    options: list[Formula] = []
    rejected: list[Rejected] = []
    if library is None or request.exact:
        return options, rejected
    group = _Group(library=library, geometry=request.geometry, parameters=parameters, operation=request.collective)
    for model in library.has(request.collective):
        name = f"{library.name} {model.name}"
        if model.schedule or request.algorithm not in (None, name):
            continue
        if (why := group.why_not(model)) is not None:
            rejected.append(Rejected(algorithm=name, why=why))
            continue
        options += _protocol_options(model, group, placement)
    return options, rejected


def _protocol_options(model: LibraryAlgorithm, group: _Group, placement: Placement) -> Iterator[Formula]:
    """Yield an option for each protocol of an algorithm that runs over the wires of the group."""
    name, launch_s = f"{group.library.name} {model.name}", group.parameters.launch_s
    for protocol in model.protocols:
        if group.carries(protocol):
            way = group.way(model, protocol)
            loads = on(placement, _wire_loads(group.geometry, way), parameters=group.parameters)
            yield Formula(
                name,
                f"protocol {protocol.kind}",
                partial(way.terms, launch_s),
                f"{name}: only the machine's library can run it; choose another algorithm",
                parts=(PricedPhase(loads),),
                steps=way.steps,
                of_library=True,
            )
