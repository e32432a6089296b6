"""Threads of tests."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Thread


@contextmanager
def running(*threads: Thread) -> Iterator[None]:
    """Run threads beside a block; wait for the end of each after it, unless the block raises."""
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def run_threads(threads: Iterable[Thread]) -> None:
    """Start threads, all before the first of them is waited for, and wait for the end of each."""
    with running(*threads):
        pass
