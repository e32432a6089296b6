"""`overlap plan SUBJECT`: a collective on a machine, or a pipeline schedule."""

# collective, schedule: the options of each subject, and the page and the JSON that describe it

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...collectives.generators import GENERATORS
from ...errors import UsageError
from ...parallel.schedules import FAMILIES
from ..options import add_options, given_values, option_flag, shared_option
from ..output import Result, print_page_or_json
from ..parser import Parser
from . import collective, schedule

DESCRIPTION = """\
Show what a collective becomes on a machine, or a pipeline schedule.

OP, such as all_reduce: the algorithm that is predicted to be fastest, every other one with its time, and why. Shapes
that nobody published measurements of are marked as extrapolated.

SCHEDULE, such as 1f1b: the computes of each rank over time, its idle time, and its activations at once. A file has a
line for each rank: its actions, such as 0F0,0F1,0B0,0B1 (stage, F forward, B backward or I and W for its halves,
microbatch), as PyTorch writes them. One that misses an action, or never ends, is refused.
"""

EPILOG = f"""\
examples:
  overlap plan all_reduce --bytes 32MiB --cluster "trn2.48xlarge x4"
  overlap plan 1f1b --ranks 4 --microbatches 8

  overlap plan all_gather --bytes 256K --cluster trn1.32xlarge --group 0-7
  overlap plan mine.csv

collectives: {", ".join(GENERATORS)}

schedules: {", ".join(FAMILIES)}
"""

_SHARED = {
    "ranks": shared_option("ranks", "of SCHEDULE, default: 4", read=str),
    "group": shared_option("group", "of OP, default: all ranks"),
    "json": shared_option("json"),
}

_SUBJECTS = {"collective": collective, "schedule": schedule}


def add_arguments(parser: Parser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("subject", metavar="SUBJECT", help="OP or SCHEDULE")
    add_options(parser, _SHARED)
    for name, subject in _SUBJECTS.items():
        add_options(parser.add_argument_group(f"of a {name}"), subject.OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code 0.

    Raises:
        UsageError: If the subject is unknown, or an option does not go with it or has an impossible value.
        TopologyError: If a machine is unknown, or a group is not legal on it.
        ScheduleError: If a file holds no schedule.
    """
    options_of_kinds = {name: given_values(args, subject.OPTIONS) for name, subject in _SUBJECTS.items()}
    kind = _find_subject_kind(args.subject, options_of_kinds)
    for other, values_of_kind in options_of_kinds.items():
        if other != kind and values_of_kind:
            name = next(iter(values_of_kind))
            flag = option_flag(name, _SUBJECTS[other].OPTIONS[name])
            raise UsageError(f"{flag}: only of a {other}; {args.subject} is a {kind}; leave it out")
    if kind == "schedule" and args.group is not None:
        raise UsageError(f"--group: only of a collective; {args.subject} is a schedule; leave it out")
    plan: Callable[[str, Mapping[str, Any]], Result] = _SUBJECTS[kind].document_and_page
    return print_page_or_json(args, *plan(args.subject, {**options_of_kinds[kind], **given_values(args, _SHARED)}))


def _find_subject_kind(subject: str, options_of_kinds: Mapping[str, Mapping[str, object]]) -> str:
    """Return the kind of a subject; options decide for unknown names, so that the message fits."""
    if subject in GENERATORS:
        return "collective"
    if subject.lower() in FAMILIES or Path(subject).exists():
        return "schedule"
    kinds = [name for name, options in options_of_kinds.items() if options]
    if len(kinds) == 1:
        return kinds[0]
    close = get_close_matches(subject.lower(), [*GENERATORS, *FAMILIES], n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    raise UsageError(
        f"SUBJECT: {subject!r}{meant} is no file, no collective ({', '.join(GENERATORS)}) and no schedule "
        f"({', '.join(FAMILIES)}); a machine is drawn by `overlap topology`"
    )
