"""What a run cannot be asked to be: one check a setting, each raises a `UsageError` that names it and the value."""

from __future__ import annotations

import os
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import cast

from transports import Transport

from .errors import UsageError
from .timeline.recording import KeptSteps

_LONGEST_OUTAGE_S = 15  # a process that no rail leads to is lost after these (`transports.efa`)


def check_ranks(ranks: object) -> None:
    """A positive integer."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"ranks: expected a positive integer, got {ranks!r}")


def check_seconds(name: str, given_s: object) -> None:
    """A positive number of seconds."""
    if not isinstance(given_s, Real) or isinstance(given_s, bool) or not float(given_s) > 0:
        raise UsageError(f"{name}: expected a positive number of seconds, got {given_s!r}")


def check_outage(given_s: object) -> None:
    """Seconds; connections for data are dialled no longer than these."""
    check_seconds("outage_s", given_s)
    if not 1 <= cast(float, given_s) <= _LONGEST_OUTAGE_S:
        raise UsageError(f"outage_s: expected from 1 to {_LONGEST_OUTAGE_S} seconds, got {given_s:g}")


def check_trace(trace: object) -> None:
    """A file in a folder that is there."""
    if not isinstance(trace, (str, PathLike)) or not os.fspath(trace):
        raise UsageError(f"trace: expected the name of a file, got {trace!r}")
    if not Path(trace).parent.is_dir():
        raise UsageError(f"trace: the folder {str(Path(trace).parent)!r} does not exist")


def check_trace_steps(steps: object) -> None:
    """Which steps of a run its trace keeps."""
    try:
        KeptSteps.parse(str(steps))
    except ValueError as error:
        raise UsageError(f"trace_steps: {error}") from None


def check_data_check(check: object) -> None:
    """What sent data can be looked at for."""
    if check != "nan":
        raise UsageError(f"check: expected 'nan', got {check!r}")


def check_folder(name: str, folder: str) -> None:
    """A folder, or what can become one."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{name}: {folder} is no folder")


def check_cluster(cluster: object) -> None:
    """A cluster, or the name of one."""
    if isinstance(cluster, str):
        return
    import topology  # here, because a program that only imports us should not pay for the machines

    if not isinstance(cluster, topology.Cluster):
        raise UsageError(f"cluster: expected a cluster or its name, got {cluster!r}")


def check_algorithm(name: str) -> None:
    """One that there is."""
    from .cost import select  # and with it the generators

    select.check_algorithm(name)


def check_wires(wires: object) -> None:
    """A transport, or a function that makes one."""
    if not isinstance(wires, Transport) and not callable(wires):
        named = f"; those that have names are given by --transport {wires}" if isinstance(wires, str) else ""
        raise UsageError(
            f"transport: expected a transport, or a function that makes one of another, got {wires!r}{named}"
        )
