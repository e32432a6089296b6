"""Threads of tests."""

from collections.abc import Iterable
from threading import Thread


def run_threads(threads: Iterable[Thread]) -> None:
    """Start threads, all before the first of them is waited for, and wait for the end of each."""
    started = list(threads)
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
