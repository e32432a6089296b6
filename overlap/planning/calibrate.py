"""Calibration of a machine: fits it to rows that a benchmark printed or measured, and writes its machine file."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import topology

from ..cost.fitting import MachineFit, Sample, fit, wire_s
from ..cost.own import OwnFit
from ..defaults import INLINE_BYTES
from ..errors import UsageError
from ..units import format_bytes, format_s
from .benchmark_logs import BenchmarkLog, LogRow, read

_LEAST_ROWS = 4

# Switches that reduce on the way halve the bytes that each rank sends; no algorithm of ours sends fewer.
_SWITCH_REDUCTION_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A machine fitted to the logs of benchmarks."""

    cluster: topology.Cluster  # The cluster that the logs are of
    paths: Sequence[str]  # The files of the logs
    logs: Sequence[BenchmarkLog]  # Their rows
    fit: MachineFit  # The fitted figures, and the error of each row

    @property
    def base(self) -> str:
        """The built-in machine that the machine file extends."""
        return self.cluster.machine.name

    def machine_file(self, name: str) -> str:
        """Return the text of the machine file, with `name` as the name of the machine."""
        return _format_machine_file(self, name)


def calibrate(paths: Sequence[str], name: str, *, op: str | None = None, ranks: int | None = None) -> Calibration:
    """Fit the figures of a machine to logs of benchmarks.

    Args:
        paths: The files of the logs.
        name: The cluster that they are of, such as "p5.48xlarge x2".
        op: The collective, where a log lacks it.
        ranks: Number of ranks, where a log lacks it.

    Raises:
        UsageError: If a log cannot be read, or does not fit the cluster; names file, row and what was expected.
        TopologyError: If there is no such machine.
    """
    cluster = topology.cluster(name, strict=False)
    if cluster.machine.devices is None:
        raise UsageError("--cluster: 'local' has no wires to fit; name the machine that the log is of")
    base = name.split()[0]
    if base not in topology.names():
        raise UsageError(f"--cluster: a machine file extends one of ours, which {base!r} is not")
    if ranks is not None and ranks < 2:
        raise UsageError(f"--ranks: expected 2 or more, got {ranks}")
    logs = [read(path, op=op, ranks=ranks) for path in paths]
    samples = [_make_sample(row, cluster) for log in logs for row in log.rows]
    if len(samples) < _LEAST_ROWS:
        raise UsageError(f"{paths[0]}: expected {_LEAST_ROWS} rows or more, found {len(samples)}")
    return Calibration(cluster=cluster, paths=paths, logs=logs, fit=fit(cluster, samples))


def _make_sample(row: LogRow, cluster: topology.Cluster) -> Sample:
    """Return a row as a sample to fit; refuse one that does not fit the cluster, or is faster than its wires."""
    ranks = row.ranks or cluster.world_size
    if ranks < 2:
        raise UsageError(f"{row.where}: expected a collective of 2 ranks or more, found {ranks}")
    if ranks > cluster.world_size:
        raise UsageError(
            f"{row.where}: {ranks} ranks do not fit {cluster.name}, which has {cluster.world_size}; "
            "name the cluster of the log"
        )
    row_ranks = _ranks_at_places(row, cluster) or tuple(range(ranks))
    sample = Sample(collective=row.collective, nbytes=row.nbytes, dtype=row.dtype, ranks=row_ranks, time_s=row.time_s)
    if row.time_s < (least_s := _SWITCH_REDUCTION_SHARE * wire_s(cluster, sample)):
        raise UsageError(
            f"{row.where}: expected {format_s(least_s)} or more, half of what {format_bytes(row.nbytes)} on "
            f"{len(row_ranks)} ranks of {cluster.name} takes at the full rate of its wires, found "
            f"{format_s(row.time_s)}"
        )
    return sample


def _ranks_at_places(row: LogRow, cluster: topology.Cluster) -> tuple[int, ...]:
    """Return the ranks at the hosts and devices that a row names; none if it names none."""
    if not row.places:
        return ()
    hosts, devices = (max(column) + 1 for column in zip(*row.places, strict=True))
    if hosts > cluster.nodes or devices > cluster.ranks_per_node:
        raise UsageError(
            f"{row.where}: expected ranks on at most {cluster.nodes} hosts with {cluster.ranks_per_node} devices, as "
            f"{cluster.name} has, found {hosts} with {devices}"
        )
    return tuple(host * cluster.ranks_per_node + device for host, device in row.places)


# -- machine files ---------------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """Return a text as a TOML string, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def figure_line(source: str, confidence: str, key: str, value: float) -> str:
    """Return the line of a figure in a machine file."""
    number = str(value) if isinstance(value, int) else f"{value:.6g}"
    return f'{key} = {{ value = {number}, source = {quoted(source)}, confidence = "{confidence}" }}'


def _format_machine_file(result: Calibration, name: str) -> str:
    """Return the machine file: the fitted latencies and efficiencies, with their source."""
    fit, network = result.fit, result.cluster.machine.network
    source = ", ".join(f"{log.tool} in {Path(path).name}" for log, path in zip(result.logs, result.paths, strict=True))
    count, middle, worst = fit.errors(left_out=True)
    hashes = ", ".join(f"{Path(p).name} {hashlib.sha256(Path(p).read_bytes()).hexdigest()[:12]}" for p in result.paths)
    line = partial(figure_line, f"fitted: {source}", "B")
    lines = [
        f"# Written by `overlap calibrate` from {quoted(source)[1:-1]} (SHA-256 {quoted(hashes)[1:-1]}).",
        f"# {count} rows that were left out: median error {middle:.1%}, worst {worst:.1%}.",
        f'extends = "{result.base}"',
        f"name = {quoted(name)}",
    ]
    inside_s, between_s = fit.launches.inside_s, fit.launches.between_s
    if inside_s is not None:
        lines += ["", "[collectives]", line("launch_s", inside_s)]
    for kind, share in fit.shares.items():
        lines += ["", f"[collectives.wires.{kind}]", line("efficiency", float(f"{share:.4g}"))]
        if network and kind == network.link and between_s is not None:
            lines += [line("launch_s", between_s)]
    return "\n".join(lines) + "\n"


def own_machine_file(name: str, fit: OwnFit, *, between: str, cores: int) -> str:
    """Return the machine file of this computer, by which `local` predicts it.

    Args:
        name: The name of the machine.
        fit: The fitted figures.
        between: What joins processes, in words.
        cores: Processors of this computer.
    """
    count, middle, worst = fit.errors(left_out=True)
    line, figures = partial(figure_line, "measured: overlap calibrate --here", "D"), fit.between
    wire_keys = ("step_s", "gap_s", "incast_s", "busy_s", "busy_bytes_per_s")
    memory_keys = ("meeting_s", "phase_s", "memory_bytes_per_s", "launch_s", "reducer_bytes_per_s")
    between_nodes = [
        "[collectives.between_nodes]",
        f"shared_memory = {'true' if 'phase_s' in figures else 'false'}",
        line("cores", cores),
        *(line(key, figures[key]) for key in memory_keys if key in figures),
        "",
    ]
    if "step_s" in figures:
        between_nodes += [
            "[collectives.between_nodes.wires.efa]",
            *(line(key, figures["step_s" if key in ("gap_s", "incast_s") else key]) for key in wire_keys),
            "",
        ]
    return "\n".join(
        [
            f"# Written by `overlap calibrate --here` on {platform.machine()}, {cores} processors, Python "
            f"{platform.python_version()}; processes joined by {between}.",
            f"# {count} rows that were left out: median error {middle:.1%}, worst {worst:.1%}.",
            'extends = "local"',
            f'name = "{name}"',
            "",
            "[collectives]",
            *(line(key, value) for key, value in fit.inside.items()),
            figure_line("overlap/defaults.py", "A", "inline_bytes", INLINE_BYTES),
            "",
            *(between_nodes if fit.between else []),
        ]
    )
