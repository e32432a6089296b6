"""Processes of a measured world and what joins them: settings of `overlap run`, and their options of this command."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overlap import UsageError, run
from overlap.cli.bench.cases import Case
from overlap.cli.bench.measuring import Result, measure_case, summarize_case
from overlap.cli.bench.sampling import Sampling
from overlap.cli.options import shared_option
from overlap.config import RunConfig, setting_environment
from overlap.settings import Option, format_setting
from overlap.units import parse_yes_no
from tests.benchmarks.children import read_json_lines, start

from .assignment import AssignmentInTurn

MEMBER = f"{__package__}.member"
"""Module that each process of ours runs."""
_LIMIT_S = 600  # for each row: it ends a world in which a rank waits for ever

OPTIONS = {
    "tcp": Option(read=parse_yes_no, help="join the processes by TCP, not by Unix sockets"),
    **{name: shared_option(name) for name in ("rails", "peer_direct", "checksums", "transport")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """Processes of a measured world, all of them on this host, and the transport that joins them."""

    processes: int = 1  # Number of processes, over which ranks are spread evenly; 1 is this process itself
    tcp: bool = False  # Whether sockets use TCP instead of Unix sockets, which are faster on one machine
    rails: str | None = None  # Number of connections between two processes, or interfaces; None: the default
    peer_direct: bool = True  # Whether sockets read and write the arrays themselves
    checksums: bool | None = None  # Whether received payloads are checked; None: the transport's default
    transport: str = "auto"  # "auto", "shared_memory", "sockets", or the name of another package's transport

    def options(self, ranks: int, *, rows: int = 1, algorithm: str | None = None) -> list[str]:
        """Return the options of `overlap run` for a world of `ranks` ranks that measures `rows` rows."""
        options = ["--processes", str(self.processes), "--ranks-per-process", str(ranks // self.processes)]
        # a host for each process: on one host only algorithms of its memory would be chosen
        options += ["--cluster", f"local x{self.processes}", "--timeout", str(rows * _LIMIT_S)]
        options += ["--transport", self.transport]
        options += [] if self.rails is None else ["--rails", self.rails]
        options += [] if self.checksums is None else ["--checksums" if self.checksums else "--no-checksums"]
        return options if algorithm is None else [*options, "--algorithm", algorithm]

    @property
    def variables(self) -> dict[str, str]:
        """Settings of `overlap run` without an option."""
        return {"OVERLAP_UNIX": str(int(not self.tcp)), "OVERLAP_PEER_DIRECT": str(int(self.peer_direct))}

    def describe(self) -> str:
        """Return the layout in words."""
        if self.processes == 1:
            return "ranks in one process"
        return (
            f"ranks in {self.processes} processes of this host (local x{self.processes}) "
            f"joined by {self._describe_wires()}"
        )

    @property
    def shares_memory(self) -> bool:
        """Whether processes share memory, because no option concerns sockets only."""
        plain = not self.tcp and self.rails in (None, "1") and self.peer_direct and self.checksums is None
        return self.transport == "shared_memory" or (self.transport == "auto" and plain)

    def _describe_wires(self) -> str:
        """Return the transport between processes in words, with its options: `TCP over 4 connections`."""
        if self.shares_memory:
            return "shared memory"
        if self.transport not in ("auto", "efa", "sockets"):
            return self.transport  # of another package: which of the options it takes is its own affair
        wires = "TCP" if self.tcp else "Unix sockets"
        if self.rails is not None:
            wires += f" over {self.rails}" + (" connections" if self.rails.isdecimal() else "")
        if self.checksums is not None:
            wires += f", {'with' if self.checksums else 'without'} checksums of payloads"
        return wires if self.peer_direct else f"{wires}, through a bounce buffer"


def layout(args: argparse.Namespace) -> ProcessLayout:
    """Return the processes of the worlds that the options ask for, and the transport between them.

    Raises:
        UsageError: If an option concerns several processes, and there is only this one.
    """
    processes = args.processes or 1
    for name in OPTIONS:
        if processes == 1 and getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: concerns what joins processes; give --processes 2 too")
    return ProcessLayout(
        processes=processes,
        tcp=bool(args.tcp),
        rails=None if args.rails is None else format_setting(args.rails),
        peer_direct=args.peer_direct is not False,
        checksums=args.checksums,
        transport=args.transport or "auto",
    )


def measure_cases(
    cases: Sequence[Case], sampling: Sampling, layout: ProcessLayout, *, algorithm: str | None = None
) -> Iterator[Result]:
    """Measure cases that differ only in their counts; yield each row when it is known.

    Raises:
        OverlapError: If a process of the world fails.
    """
    if layout.processes == 1:
        for case in cases:
            with setting_environment(RunConfig()):  # the settings of a launcher would change the result
                samples = run(measure_case, case, sampling, ranks=case.ranks, algorithm=algorithm)
            yield summarize_case(case, sampling, samples[0] or [])
        return
    options = layout.options(cases[0].ranks, rows=len(cases), algorithm=algorithm)
    program = [MEMBER, AssignmentInTurn(cases=cases, sampling=sampling).to_json()]
    for case, row in zip(cases, read_json_lines([start(options, program, variables=layout.variables)]), strict=True):
        yield summarize_case(case, sampling, row["told"])
