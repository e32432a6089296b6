"""Worker threads that move and reduce large arrays, in place of the event loop and the ranks' compute threads.

numpy releases the GIL inside its loops. A job is cut in pieces small enough for a core's cache; idle threads take the
next piece of the most urgent job, so an urgent job overtakes a long one at the next piece.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from queue import SimpleQueue

import numpy as np

from ...threads import start_thread

# Measured on 64 MiB float32 sums: with two to four arrays, pieces of 512 KiB stay in a 2 MiB second-level cache;
# 64 KiB pieces take 2x (one GIL hand-over each), 2 MiB pieces 1.1x.
PIECE_BYTES = 512 << 10

Piece = Callable[[], None]


class _WorkerJob:
    """A job of the worker threads: pieces of work, and the callback of the end.

    Args:
        pieces: The pieces, in the order in which threads take them.
        done: Called with the first error, or None, in the thread that finishes the last piece.
    """

    def __init__(self, pieces: Sequence[Piece], done: Callable[[BaseException | None], None]) -> None:
        self.pieces, self.done = pieces, done
        self.next, self.remaining = 0, len(pieces)
        self.error: BaseException | None = None


def _context_without_warnings() -> Context:
    """Return a context in which numpy does not warn, such as of an infinite gradient: the program has to judge that.

    To run in a context made beforehand takes a tenth of the time of `np.errstate`.
    """
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context


class Workers:
    """Pool of threads, which start with the first job and are joined in `close`.

    Args:
        threads: Greatest number of threads; None: one for each core.

    Attributes:
        without_warnings: Context without numpy's warnings, for small work on the event loop; the threads have one, too.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.without_warnings: Context = _context_without_warnings()
        self._thread_count = threads or os.cpu_count() or 1
        self._jobs: list[tuple[int, int, _WorkerJob]] = []  # a heap, by priority, then by order of submission
        self._job_numbers = itertools.count()
        self._lock = threading.Lock()
        # True wakes a thread for work, False ends a thread. It takes a third of the time of a `Condition`.
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, pieces: Sequence[Piece], done: Callable[[BaseException | None], None], *, priority: int) -> None:
        """Run a job in the worker threads, and return at once.

        Args:
            pieces: Functions to call, in any order and in several threads. Without pieces, `done` is called at once.
            done: Called with the first error, or None, in the thread that finishes the last piece.
            priority: Jobs with a lower number go first; jobs of one priority go in the order of submission.
        """
        if not pieces:
            done(None)
            return
        self._start_threads()
        with self._lock:
            heapq.heappush(self._jobs, (priority, next(self._job_numbers), _WorkerJob(pieces, done)))
        for _ in range(min(len(pieces), self._thread_count)):
            self._wakeups.put(True)

    def limit_threads(self, processes_on_host: int) -> None:
        """Limit the number of threads to this process's share of the cores. Threads that exist already remain.

        Args:
            processes_on_host: Number of processes of this host that work at the same time, including this one.

        Measured on 64 MiB, 2 and 4 processes on 2 cores: one thread in each is 4 % faster than two.
        """
        self._thread_count = max(1, min(self._thread_count, (os.cpu_count() or 1) // processes_on_host))

    def close(self) -> None:
        """Wait until the running jobs have finished, and join the threads."""
        for _ in self._threads:
            self._wakeups.put(False)  # ends one thread
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start_threads(self) -> None:
        """Start the threads that are missing."""
        while len(self._threads) < self._thread_count:
            thread = threading.Thread(
                target=_context_without_warnings().run,
                args=(self._run_worker,),
                name=f"overlap-reduce-{len(self._threads)}",
                daemon=True,
            )
            start_thread(thread)
            self._threads.append(thread)

    def _take_piece(self) -> tuple[_WorkerJob, Piece] | None:
        """Return the most urgent job and its next piece; None without a job."""
        with self._lock:
            if not self._jobs:
                return None
            _, _, job = self._jobs[0]
            piece = job.pieces[job.next]
            job.next += 1
            if job.next == len(job.pieces):
                heapq.heappop(self._jobs)
            return job, piece

    def _run_worker(self) -> None:
        """Run pieces at each True of `_wakeups`, until it has False. This is the body of a worker thread."""
        while self._wakeups.get():
            while (taken := self._take_piece()) is not None:
                self._run_piece(*taken)
                del taken  # an idle thread must not keep arrays alive

    def _run_piece(self, job: _WorkerJob, piece: Piece) -> None:
        """Run a piece, and record its error. After the last piece, call the job's `done`."""
        try:
            piece()
        except BaseException as error:
            job.error = job.error or error
        with self._lock:
            job.remaining -= 1
            last = job.remaining == 0
        if last:
            job.done(job.error)
