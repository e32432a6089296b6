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


class _CopyJob:
    """Pieces in the order they are taken; `order` sorts jobs of equal priority by age."""

    def __init__(self, pieces: Sequence[Piece], done: Callable[[BaseException | None], None]) -> None:
        self.pieces, self.done = pieces, done
        self.next, self.remaining = 0, len(pieces)
        self.error: BaseException | None = None


def _context_without_warnings() -> Context:
    """Return a context in which numpy does not warn: an infinite gradient is the program's business.

    numpy keeps that setting in the context; entering one made beforehand costs a tenth of `np.errstate`.
    """
    context = copy_context()
    context.run(np.seterr, all="ignore")
    return context


class Workers:
    """Pool of threads, started with its first work and joined in `close`.

    Attributes:
        quiet: Context for small work in the event loop: numpy does not warn there, nor in the threads.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.quiet: Context = _context_without_warnings()
        self._size = threads or os.cpu_count() or 1
        self._jobs: list[tuple[int, int, _CopyJob]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._bell: SimpleQueue[bool] = SimpleQueue()  # wakes a thread in a third of the time a Condition takes
        self._threads: list[threading.Thread] = []

    def submit(self, pieces: Sequence[Piece], done: Callable[[BaseException | None], None], *, priority: int) -> None:
        """Run all `pieces`, in any order; then call `done` (with the first error, if any) in the thread of the last."""
        if not pieces:
            done(None)
            return
        self._start_threads()
        with self._lock:
            heapq.heappush(self._jobs, (priority, next(self._order), _CopyJob(pieces, done)))
        for _ in range(min(len(pieces), self._size)):
            self._bell.put(True)

    def share(self, processes: int) -> None:
        """Limit the threads, given the number of processes of this machine that work at the same time, this one
        included.

        Measured on 64 MiB, 2 and 4 processes on 2 cores: one thread in each is 4 % faster than two.
        """
        self._size = max(1, min(self._size, (os.cpu_count() or 1) // processes))

    def close(self) -> None:
        """Let the running jobs finish and join the threads."""
        for _ in self._threads:
            self._bell.put(False)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start_threads(self) -> None:
        """Start missing worker threads."""
        while len(self._threads) < self._size:
            thread = threading.Thread(
                target=_context_without_warnings().run,
                args=(self._work,),
                name=f"overlap-reduce-{len(self._threads)}",
                daemon=True,
            )
            start_thread(thread)
            self._threads.append(thread)

    def _take_piece(self) -> tuple[_CopyJob, Piece] | None:
        """Return the next piece of the first job; None without a job."""
        with self._lock:
            if not self._jobs:
                return None
            job = self._jobs[0][2]
            piece = job.pieces[job.next]
            job.next += 1
            if job.next == len(job.pieces):
                heapq.heappop(self._jobs)
            return job, piece

    def _work(self) -> None:
        """Do pieces in a worker thread, whenever the bell rings, until it rings for the end."""
        while self._bell.get():
            while (taken := self._take_piece()) is not None:
                self._do_piece(*taken)
                del taken  # an idle thread must not hold arrays

    def _do_piece(self, job: _CopyJob, piece: Piece) -> None:
        """Do a piece of a job; the last piece ends the job."""
        try:
            piece()
        except BaseException as error:
            job.error = job.error or error
        with self._lock:
            job.remaining -= 1
            last = job.remaining == 0
        if last:
            job.done(job.error)
