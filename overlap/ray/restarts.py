"""Attempts of a job until one ends well: the first failure of an attempt, its timeline and its flight records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ray import cloudpickle

from transports import TransportError

from .. import trace_files
from ..errors import OverlapError, PeerError, PeerLostError, RankFailedError, UsageError
from ..flight.folder import ENDING, default_folder
from ..launch.restarts import AttemptProgress
from ..notice import notify
from ..processes.status import status_from_error
from ..processes.traces import part_path
from ..timeline.files.trace import join_parts
from ..waits.signs import Evidence
from .job import SPANS, JobSpec, MemberEnd, Outcome


def run_attempts(job: JobSpec, run_attempt: Callable[[JobSpec], Outcome], *, max_restarts: int) -> list[object]:
    """Run a job, again after failures, and return the results in the order of ranks.

    Args:
        job: The job.
        run_attempt: Function that runs one attempt until all its members have ended.
        max_restarts: Number of times that the job may be started again.

    Raises:
        RankFailedError: The last attempt has failed; the first failure is the `__cause__`.
        UsageError: Nothing could run; that is not tried again.
    """
    if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
        raise UsageError(f"max_restarts: expected an integer of 0 or more, got {max_restarts!r}")
    config, folder = job.config, Path(job.config.flight_dir or default_folder())
    advance = AttemptProgress(config.state_dir)
    for attempt in range(max_restarts + 1):
        outcome = run_attempt(replace(job, attempt=attempt))
        records = _write_records(outcome, folder)
        if config.trace is not None:
            _write_trace(outcome, str(config.trace))
        error = find_first_failure(job, outcome)
        if error is None:
            ends = [outcome.ends[member] for member in range(job.members)]
            return [cloudpickle.loads(result) for end in ends for result in end.results or ()]
        if isinstance(error, UsageError):
            raise error
        # Give up after the last attempt, or when attempts make no progress.
        latest = advance.record_progress(records)
        if attempt == max_restarts or advance.hopeless:
            if attempt:
                notify(advance.describe_giving_up(attempt))
            if records:
                error.add_note(f"flight records of {len(records)} processes are in {folder}: `overlap why` reads them")
            raise error
        why = str(error).splitlines()[0]
        notify(advance.describe_restart(attempt + 1, max_restarts, latest, config.state_dir, why))
        time.sleep(advance.pause_s)
    raise AssertionError("this is a bug in overlap, please report it: the last attempt has returned or raised")


def _write_records(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the flight records that members have sent into a folder; return the paths of the written files."""
    paths = []
    for files in (*(end.files for end in outcome.ends.values()), outcome.files):
        for name in filter(lambda name: name.endswith(ENDING), files):
            path = folder / Path(name).name  # only the last part: a name from another machine must not leave the folder
            with suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.unlink(missing_ok=True)  # there may be a link that a killed process has left
                path.write_bytes(files[name])
                path.chmod(0o600)
                paths.append(path)
    return paths


def _write_trace(outcome: Outcome, path: str) -> None:
    """Join the timelines of all members, also of killed ones, and write them as the trace of the run.

    If that fails, print a notice and do not raise: the result of the run is more important.
    """
    texts = [end.spans for end in outcome.ends.values() if end.spans]
    texts += [data for name, data in outcome.files.items() if name.endswith(SPANS) and data]
    parts = [part_path(path, number) for number in range(len(texts))]
    try:
        for part, text in zip(parts, texts, strict=True):
            part.write_bytes(text)
        if parts:
            join_parts(parts, path)
            trace_files.record_written(path)
    except (OSError, UsageError) as error:
        notify(f"no trace in {path}: {error}; pass trace= a path that can be written")


# -- the first failure -------------------------------------------------------------------------------------------------


def find_first_failure(job: JobSpec, outcome: Outcome) -> OverlapError | None:
    """Return the error with which an attempt has ended, or None if all members have returned results.

    Errors are ordered by cause, not by time. First comes the error of a member whose own rank failed, then those of
    members that ended because of another member, then Ray's reports of lost processes. Ray's reports become notes on
    the error. They are the error itself if members know only that another process was lost before they met.
    """
    failed = {member: end.error for member, end in outcome.ends.items() if end.error is not None}
    guiltiest = min(failed, key=lambda member: _evidence_order_key(failed[member], job.ranks(member)), default=None)
    if guiltiest is None or (outcome.lost and isinstance(failed[guiltiest], PeerError)):
        return _lost_member_error(job, *next(iter(outcome.lost.items()))) if outcome.lost else None
    error = failed[guiltiest]
    for member, why in outcome.lost.items():
        ranks = job.ranks(member)
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        error.add_note(f"the process of {label} {why}")
    return error


def _evidence_order_key(error: OverlapError, local: range) -> tuple[bool, Evidence, bool]:
    """Return a sort key of a member's error: usage errors first, then by evidence; `local` are the member's ranks."""
    # Of equal evidence, the error of a connection comes last.
    wire = isinstance(error, RankFailedError) and isinstance(error.cause, TransportError)
    return not isinstance(error, UsageError), status_from_error(error, local=local).evidence, wire


def _lost_member_error(job: JobSpec, member: int, why: str) -> OverlapError:
    """Return the error for a lost member if no other error explains it better; `why` is the end of a sentence."""
    rank, world_size = job.ranks(member)[0], job.members * job.ranks_each
    cause = PeerLostError(f"its process on Ray {why}", culprit=rank)
    error = RankFailedError(rank=rank, cause=cause, where="", doing=(), others={}, world_size=world_size)
    error.__cause__ = cause
    return error


def blamed_members(job: JobSpec, ends: Mapping[int, MemberEnd]) -> set[int]:
    """Return the members without a report of which other members have reported that they are lost."""
    errors = [end.error for end in ends.values() if isinstance(end.error, RankFailedError)]
    blamed = {error.rank // job.ranks_each for error in errors if isinstance(error.cause, PeerLostError)}
    return {member for member in blamed if member >= 0 and member not in ends}
