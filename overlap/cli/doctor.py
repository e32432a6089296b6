"""`overlap doctor`: checks the software, the machine and the network, and prints fixes."""

from __future__ import annotations

import argparse
import os
import re
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from transports.shared_memory.engine import BUILT, STALE

from ..config import unknown_variable_lines
from ..errors import UsageError
from ..flight.folder import ENDING, default_folder, is_alive
from ..flight.reading import read_flight
from ..units import format_bytes, wrap_text
from ..version import install_command, version
from .options import add_options, shared_option
from .output import page_width, print_page_or_json

DESCRIPTION = """\
Look at versions, cores, shared memory, limits, sockets, settings, and what failed runs have left. Nothing is changed.
The exit code is 1 if something does not work; what is missing or slow does not count.
"""

EPILOG = """\
examples:
  overlap doctor
  overlap doctor --json >doctor.json      for a bug report
"""

State = Literal["good", "note", "slow", "missing", "wrong"]
"""State of a checked part.

good: as it should be. note: works, and there is a remark. slow: works, but more slowly than it could. missing: an
optional package is not installed. wrong: does not work.
"""

_MARKS: dict[State, str] = {"good": "ok", "note": "note", "slow": "slow", "missing": "-", "wrong": "WRONG"}
_LABEL_WIDTH = 26
"""Width of the columns for the state and the subject on the page."""

_LEAST_FILES = 1024
"""Least number of open files that is enough: a process needs about 8 for each process that sockets join it to."""

_EXTRAS = ("torch", "ray")
"""Extras of the distribution that programs need; the others are for its developers."""

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:[^;>]*>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['"]([^'"]+)['"])?""")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check."""

    subject: str  # Name of the checked part on the page
    state: State
    text: str  # What was observed
    fix: str = ""  # Command or setting that fixes it; empty: nothing needs to be fixed, or no fix is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add_options(parser, {"json": shared_option("json")})


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    results = list(run_checks())
    found = {"findings": [asdict(result) for result in results]}
    print_page_or_json(args, lambda: found, lambda: page_lines(results, page_width()), version=2)
    return int(any(result.state == "wrong" for result in results))


def page_lines(findings: Sequence[CheckResult], width: int) -> Iterator[str]:
    """Yield the lines of the page: all findings, and how many there are of each state.

    Args:
        findings: The findings.
        width: Columns of the page.
    """
    for finding in findings:
        first = f"{_MARKS[finding.state]:<6}{finding.subject:<{_LABEL_WIDTH - 6}}"
        yield from wrap_text(
            finding.text, width, first=first if first.endswith(" ") else f"{first} ", rest=" " * _LABEL_WIDTH
        )
        if finding.fix:
            yield f"{' ' * _LABEL_WIDTH}fix: {finding.fix}"
    counted = Counter(finding.state for finding in findings)
    yield ""
    yield ", ".join(f"{counted[state]} {state}" for state in _MARKS if counted[state])


def run_checks() -> Iterator[CheckResult]:
    """Yield the findings about software, machine, network, settings and records."""
    text = f"{sys.version.split()[0]}, {sys.executable}; overlap {version()} in {Path(__file__).parents[2]}"
    yield CheckResult(subject="python", state="good", text=text)  # an older one cannot read this file
    with suppress(metadata.PackageNotFoundError):  # a checkout that is not installed
        yield from check_packages(metadata.requires("overlap") or [], metadata.version)
    yield from check_shadowing(sys.path)
    yield check_cores(len(os.sched_getaffinity(0)), os.getloadavg()[0], _read_core_quota())
    yield check_engine(BUILT, STALE)
    yield check_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_sockets()
    yield from (CheckResult(subject="setting", state="note", text=text) for text in unknown_variable_lines())
    folder = os.environ.get("OVERLAP_FLIGHT_DIR")
    yield check_records(Path(folder) if folder else default_folder())


def check_packages(requirements: Sequence[str], installed: Callable[[str], str]) -> Iterator[CheckResult]:
    """Yield a finding for each required package that is missing or too old, and one finding for all others.

    Args:
        requirements: Requirements of this package, as in its metadata: "numpy>=1.26; extra == 'x'".
        installed: Returns the version of a distribution, or raises `PackageNotFoundError`.
    """
    good: list[str] = []
    for requirement in requirements:
        name, least, extra = _REQUIREMENT.findall(requirement)[0]
        if name == "overlap" or extra not in ("", *_EXTRAS):
            continue
        fix = install_command(extra) if extra else f'pip install "{name}>={least}"'
        try:
            present = installed(name)
        except metadata.PackageNotFoundError:
            yield CheckResult(subject=name, state="missing" if extra else "wrong", text="is not installed", fix=fix)
            continue
        if least and parse_version_numbers(present) < parse_version_numbers(least):
            yield CheckResult(subject=name, state="wrong", text=f"{present} is older than {least}, the lowest", fix=fix)
        else:
            good.append(f"{name} {present}")
    if good:
        yield CheckResult(subject="packages", state="good", text=", ".join(good))


def parse_version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    leading = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def check_shadowing(path: Sequence[str]) -> Iterator[CheckResult]:
    """Yield a finding for each foreign package on the path that has the name of a package of this distribution.

    Args:
        path: Folders in which Python looks for packages, as `sys.path`.
    """
    folders = {Path(each or ".").resolve() for each in path} - {Path(__file__).parents[2].resolve()}
    for name in ("overlap", "topology", "transports"):
        for folder in folders:
            if (folder / name / "__init__.py").is_file():
                text = f"{folder / name} has the same name; a program that is started there may import it"
                yield CheckResult(subject=name, state="note", text=text)


def _read_core_quota() -> float | None:
    """Return how many cores' time the control group of this process grants; None if it has no limit."""
    with suppress(OSError, ValueError, IndexError):
        granted, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(granted) / int(period)
    return None


def check_cores(usable: int, load: float, quota: float | None) -> CheckResult:
    """Return the finding about cores.

    Args:
        usable: Cores that this process may use.
        load: Mean number of processes that wanted a core in the last minute.
        quota: Number of cores that a control group grants; None: it has no limit.
    """
    text = f"{usable} of {os.cpu_count()} cores, load {load:.1f}"
    if quota is not None and quota < usable:
        fix = f"start at most {max(1, int(quota))} processes here"
        return CheckResult(subject="cores", state="slow", text=f"{text}; a limit grants {quota:g}", fix=fix)
    if load > usable:
        text = f"{text}: other processes take turns with ours, and times mean little"
    return CheckResult(subject="cores", state="slow" if load > usable else "good", text=text)


def check_engine(built: bool, stale: bool = False) -> CheckResult:
    """Return the finding about the compiled engine for shared memory.

    Args:
        built: Whether the engine can be used.
        stale: Whether it was compiled for another version of overlap, and so cannot be used.
    """
    if built:
        return CheckResult(subject="host engine", state="good", text="is compiled: it joins processes of this host")
    cause = "was compiled for another version of overlap" if stale else "is not compiled"
    text = f"{cause}; sockets join processes of this host: operations take 3 to 6 times as long"
    fix = "install a C compiler and the headers of Python, then install overlap again"
    return CheckResult(subject="host engine", state="slow", text=text, fix=fix)


def check_limits(files: int) -> CheckResult:
    """Return the finding about the limits of the shell.

    Args:
        files: Number of files that a process may have open; negative: no limit.
    """
    few = 0 <= files < _LEAST_FILES  # RLIM_INFINITY is negative
    text, fix = f"{files if files >= 0 else 'any number of'} open files", f"ulimit -n {_LEAST_FILES}" if few else ""
    return CheckResult(subject="limits", state="note" if few else "good", text=text, fix=fix)


def check_sockets() -> CheckResult:
    """Connect to a listening socket on the loopback address, and return the finding about it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        text = f"127.0.0.1 cannot be reached: {error.strerror or error}"
        return CheckResult(subject="sockets", state="wrong", text=text, fix="ip link set lo up")
    return CheckResult(subject="sockets", state="good", text="TCP works")


def check_records(folder: Path) -> CheckResult:
    """Return the finding about flight records that failed runs have left in a folder."""
    sizes = list[int]()
    for path in folder.glob(f"*{ENDING}"):
        if not _is_process_alive(path):
            with suppress(FileNotFoundError):  # of a run that has just ended well
                sizes.append(path.stat().st_size)
    if not sizes:
        return CheckResult(subject="flight records", state="good", text="none of failed runs")
    text = f"{len(sizes)} of runs that failed, {format_bytes(sum(sizes))}: `overlap why` explains the last"
    return CheckResult(subject="flight records", state="note", text=text, fix=f"rm -r {folder}")


def _is_process_alive(path: Path) -> bool:
    """Return whether the process of a flight record still runs; False if the file cannot be read."""
    try:
        flight = read_flight(path)
    except UsageError:
        return False
    return is_alive(flight.host, flight.pid, flight.born)
