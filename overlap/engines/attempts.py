"""Attempts of a gang until one ends well; the driver brings home the timeline and the flight records of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from .. import trace_files
from ..config import RunConfig
from ..errors import OverlapError, RankFailedError, UsageError, in_one_line
from ..flight.folder import ENDING, default_folder
from ..launch.restarts import Advance
from ..notice import notify
from ..timeline.files.parts import Part, pack_part, read_stream
from ..timeline.files.tracefile import write_merged
from .gang import GangOutcome, GangSpec
from .home import SPANS, write_files
from .progress import latest_step, reached_step
from .verdict import failure


def run_attempts(
    spec: GangSpec,
    config: RunConfig,
    once: Callable[[GangSpec], GangOutcome],
    *,
    max_restarts: int,
    loads: Callable[[bytes], object],
) -> list[object]:
    """Run a gang, and again after failures, and return the results by rank.

    `once` runs one attempt to the end of all its members; `loads` reads a result.

    Raises:
        RankFailedError: If the last attempt has failed; the first failure is its `__cause__`.
        UsageError: If nothing could run; it is not tried again.
    """
    if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
        raise UsageError(f"max_restarts: expected 0 or more, got {max_restarts!r}")
    advance = Advance(latest_step(config.state_dir))
    for attempt in range(max_restarts + 1):
        outcome = once(spec.again(attempt))
        records = _write_records(outcome, config)
        _write_trace(outcome, config)
        error = failure(spec, outcome)
        if error is None:
            return _load_results(spec, outcome, loads)
        if isinstance(error, UsageError):
            raise error
        steps = [latest_step(config.state_dir), *(end.latest for end in outcome.ends.values())]
        latest = max((step for step in steps if step is not None), default=None)
        advance.note(latest if config.state_dir else reached_step(records))
        if attempt == max_restarts or advance.hopeless:
            if attempt:
                notify(advance.describe_giving_up(attempt))
            raise _with_records(error, records)
        notify(advance.describe_restart(attempt + 1, max_restarts, latest, config.state_dir, summary_line(error)))
        if advance.pause_s:
            time.sleep(advance.pause_s)
    raise AssertionError("the last attempt has returned or raised")


def summary_line(error: OverlapError) -> str:
    """Return the message of an error in one line; the error of a world names the rank itself."""
    if isinstance(error, RankFailedError):
        return str(error).splitlines()[0]
    return in_one_line(error)


def _load_results(spec: GangSpec, outcome: GangOutcome, loads: Callable[[bytes], object]) -> list[object]:
    """Return the results of all ranks in order, read from the ends of the members."""
    results: list[object] = []
    for member in range(spec.members):
        for rank, packed in zip(spec.ranks(member), outcome.ends[member].results or (), strict=True):
            try:
                results.append(loads(packed))
            except Exception as error:
                raise UsageError(
                    f"the result of rank {rank} cannot be loaded here: {in_one_line(error)}; return values "
                    "of types that the driver can import"
                ) from error
    return results


# -- files -------------------------------------------------------------------------------------------------------------


def _write_records(outcome: GangOutcome, config: RunConfig) -> list[Path]:
    """Write the flight records of an attempt to this machine's folder of records."""
    folder = Path(config.flight_dir) if config.flight_dir else default_folder()
    all_files = [*(end.files for end in outcome.ends.values()), outcome.files]
    flights = [{name: data for name, data in files.items() if name.endswith(ENDING)} for files in all_files]
    return [path for files in flights for path in write_files(files, folder)]


def _with_records(error: OverlapError, records: Sequence[Path]) -> OverlapError:
    """Return an error with a note on the flight records that explain it."""
    if records:
        error.add_note(
            f"flight records of {len(records)} processes are in {records[0].parent}: `overlap why` reads them"
        )
    return error


def _write_trace(outcome: GangOutcome, config: RunConfig) -> None:
    """Merge the timelines of the members, killed ones included, in the trace of the run."""
    if config.trace is None:
        return
    killed = [data for name, data in outcome.files.items() if name.endswith(SPANS)]
    packed = [end.spans for end in outcome.ends.values() if end.spans]
    try:
        packed += [pack_part(read_stream(data)) for data in killed]
        if packed:
            write_merged([Part(BytesIO(spans)) for spans in packed], config.trace)
            trace_files.note_written(config.trace)
    except (OSError, UsageError) as error:
        notify(f"no trace in {config.trace}: {error}; pass trace= a path that can be written")
