"""Processes that measure the files of a job, two at a time: `python -m overlap.timeline.why.children FILE` is one.

They run a module of their own, and not the caller's script, which may call `overlap.why` without a guard.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ...errors import UsageError
from .rank import RankReport, measure_file

AT_ONCE = 2
"""Each needs some 200 MB for 250 MB of text."""
SMALL_BYTES = 32 << 20
"""Files that together have fewer bytes are read faster than a process starts."""

Progress = Callable[[int, int], None]
"""Called with how many files are read, and how many there are."""


def measured(files: Sequence[Path], progress: Progress) -> list[RankReport]:
    """Measure each file; large ones in processes, which end with this call whatever ends it.

    Raises:
        UsageError: A file cannot be read.
    """
    if len(files) == 1 or sum(file.stat().st_size for file in files) < SMALL_BYTES or not sys.executable:
        found = []
        for number, file in enumerate(files):
            progress(number, len(files))
            found.append(measure_file(file))
        return found
    children: list[subprocess.Popen[bytes]] = []
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        reports = [pool.submit(_child, file, children) for file in files]
        for number, _ in enumerate(as_completed(reports)):
            progress(number, len(files))
        return [report.result() for report in reports]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()
        pool.shutdown()


def _child(file: Path, children: list[subprocess.Popen[bytes]]) -> RankReport:
    command = [sys.executable, "-m", __name__, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        children.append(child)
        data, _ = child.communicate()
    if child.returncode:
        raise UsageError(f"why: the process that read {file} ended with {child.returncode}, perhaps for lack of memory")
    report, refusal = pickle.loads(data)  # of our own child
    if report is None:
        raise UsageError(refusal)
    assert isinstance(report, RankReport)
    return report


def _main(path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        found = measure_file(path), ""
    except UsageError as error:
        found = None, str(error)  # type: ignore[assignment]
    sys.stdout.buffer.write(pickle.dumps(found))


if __name__ == "__main__":
    from overlap.timeline.why.children import _main as main  # so that reports are of classes that the parent has

    main(sys.argv[1])
