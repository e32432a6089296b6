"""`overlap doctor`: checks the software, the machine and the network, and prints fixes."""

# finding: one result;  software, machine, network: the checks

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain

from ...units import wrapped
from ..console import Console
from ..options import add_options, shared_option
from ..output import print_result
from . import machine, network, software
from .finding import CheckResult, State

_DESCRIPTION = """\
Look at the installation, the machine and the network: versions, cores, memory, sockets, clocks, limits, and what
failed runs have left. A line for each thing, and below it the command that fixes it. Nothing is changed.

The exit code is 1 if something does not work; what is missing or slow does not count.
"""

_EPILOG = """\
examples:
  overlap doctor
  overlap doctor --json >doctor.json      for a bug report
"""

_MARKS: dict[State, str] = {"good": "ok", "note": "note", "slow": "slow", "missing": "-", "wrong": "WRONG"}
_LABEL = 26
"""Columns of the state and the subject."""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_options(parser, {"json": shared_option("json")})


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    results = list(chain(software.findings(), machine.findings(), network.findings()))
    document = {"findings": [asdict(result) for result in results]}
    print_result(args, lambda: document, lambda: page(results, min(Console().width, 100)), version=2)
    return int(any(result.state == "wrong" for result in results))


def page(findings: Sequence[CheckResult], width: int) -> Iterator[str]:
    """Yield the lines of the page: one finding after the other, and their count.

    Args:
        findings: The findings.
        width: Columns of the page.
    """
    for finding in findings:
        first = f"{_MARKS[finding.state]:<6}{finding.subject:<{_LABEL - 6}}"
        yield from wrapped(finding.text, width, first=first if first.endswith(" ") else f"{first} ", rest=" " * _LABEL)
        if finding.fix:
            yield f"{' ' * _LABEL}fix: {finding.fix}"
    counted = Counter(finding.state for finding in findings)
    yield ""
    yield ", ".join(f"{counted[state]} {state}" for state in _MARKS if counted[state])
