"""`overlap run --max-restarts N`: starts a failed world again."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import trio

from transports.tls import Tls

from ..config import RunConfig
from ..flight.autopsy import last_signs_of_process
from ..flight.folder import ENDING, default_folder
from ..launch.nodeprocess import LaunchSpec
from ..launch.processes import LaunchOutcome, launch
from ..launch.progress import latest_step, reached_step, saved_step
from ..launch.restarts import LONGEST_PAUSE_S, Restarts, launch_again, spec_of_attempt
from ..processes.identity import RendezvousConfig
from ..processes.roll_call import call_roll
from .world_size import fewest_processes, process_count


def run_again(spec: LaunchSpec, config: RunConfig) -> LaunchOutcome:
    """Launch a world, and again after failures; the flight records of failed attempts stay."""
    assert config.max_restarts
    fewest = fewest_processes(config)
    elastic = config.node_rank is not None and fewest < process_count(config)
    records = Path(config.flight_dir or default_folder())
    restarts = Restarts(
        most=config.max_restarts,
        latest=partial(latest_step, config.state_dir),
        reached=partial(_last_step, records),
        kept=lambda pids: saved_step(_record_files(records, pids)),
        place=_relative_path(config.state_dir),
        sleep=_no_pause if elastic and config.node_rank else time.sleep,  # only host 0 pauses; the others wait for it
        fewest=None if elastic else fewest,
        signs=lambda pid: last_signs_of_process(pid, config.flight_dir),
        agree=partial(_agree_on_members, config) if elastic else None,
    )
    return launch_again(spec, restarts, lambda attempt: trio.run(launch, attempt))


def _agree_on_members(config: RunConfig, spec: LaunchSpec, attempt: int) -> LaunchSpec:
    """Agree with the launchers of other hosts on the members of an attempt, and return the launch of this host."""
    from ..processes.connect import JOIN_TIMEOUT_S

    tls = config.tls_files()
    listener = None if spec.listener is None else socket.socket(fileno=os.dup(spec.listener))
    own_launcher = RendezvousConfig(
        job=spec.job,
        member=config.node_rank or 0,
        members=int(spec.nodes),  # a range would be written as a range
        fewest=fewest_processes(config),
        epoch=attempt if listener else 0,
        endpoint=spec.endpoint,
        listener=listener,
        secret=spec.secret,
        timeout_s=config.join_timeout_s or JOIN_TIMEOUT_S,
        tls=Tls(certificate=tls[0], key=tls[1], authority=tls[2]) if tls else None,
    )
    with listener or nullcontext():
        calling = partial(call_roll, own_launcher, spec.ranks_per_node, spec.report, pause_s=LONGEST_PAUSE_S)
        part = trio.run(calling)
    return spec_of_attempt(spec, part.attempt, part.nodes, [part.index])


def _no_pause(seconds: float) -> None:
    """Sleep for no time, in place of the pause before a restart."""


def _last_step(records: Path, pids: Sequence[int]) -> int | None:
    """Return the last step that any rank of an attempt began, from the flight records."""
    return reached_step(_record_files(records, pids))


def _record_files(records: Path, pids: Sequence[int]) -> list[Path]:
    return [file for pid in pids for file in records.glob(f"*-{pid}{ENDING}")]


def _relative_path(folder: str | None) -> str | None:
    """Return a folder relative to the current one, as users write it."""
    if folder is None:
        return None
    with suppress(ValueError, FileNotFoundError):  # it lies elsewhere, or the current folder is gone
        return str(Path(folder).relative_to(Path.cwd()))
    return folder
