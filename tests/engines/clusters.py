"""Clusters of the tests here, and drivers of them as programs of their own."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


class Witness:
    """A program that is asked again and again what gangs have left on a cluster, over its input and output."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, question: str = "left") -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(question, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("TOLD "):
                return json.loads(line.removeprefix("TOLD "))
        raise AssertionError(f"{self._process.args} has ended")

    def close(self) -> None:
        self._process.communicate("")


class Driver:
    """A program that runs on a cluster."""

    def __init__(self, folder: Path, text: str, *args: str, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "driver.py"
        script.write_text(textwrap.dedent(text))
        environ = os.environ | {"PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"} | variables
        with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(script), *args], cwd=folder, env=environ, stdout=out, stderr=err
            )
        self._folder = folder

    @property
    def out(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "stderr").read_text()

    @property
    def told(self) -> Any:
        """What it has printed for the test; Ray prints lines of its own."""
        lines = [line for line in self.out.splitlines() if line.startswith("TOLD ")]
        assert lines, self.out + self.err
        return json.loads(lines[-1].removeprefix("TOLD "))

    def line_of(self, begin: str) -> int:
        """Return the number of the first line of the program that begins so."""
        lines = (self._folder / "driver.py").read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(begin))

    def wait(self) -> int:
        until(lambda: self.process.poll() is not None, self)
        return self.process.wait()

    def said(self, pattern: str) -> "re.Match[str]":
        """Wait until the program, or one of its ranks, has printed something."""
        return until(lambda: re.search(pattern, self.out + self.err), self)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def until(found: Callable[[], Any], of: "Driver | None" = None) -> Any:
    """Return what is found, as soon as it is.

    Patience ends when nothing is found and the driver has told nothing new for a while: machines may be slow.
    """
    told, since_s = "", time.monotonic()
    while time.monotonic() - since_s < TIMEOUT_S:
        if value := found():
            return value
        if of is not None and (now := of.out + of.err) != told:
            told, since_s = now, time.monotonic()
        time.sleep(0.1)
    raise AssertionError(f"nothing new for {TIMEOUT_S} s:\n{told[-4000:]}")


@contextmanager
def driving(folder: Path, text: str, *args: str, **variables: str) -> Iterator[Driver]:
    driver = Driver(folder, text, *args, **variables)
    try:
        yield driver
    finally:
        driver.close()


def ran(folder: Path, text: str, *args: str, **variables: str) -> Driver:
    """Run a driver to its end."""
    with driving(folder, text, *args, **variables) as driver:
        driver.wait()
    return driver


IMPORTS = """
import json, os, signal, sys, threading, time
import numpy as np
import trio
import overlap

def tell(value):
    print("TOLD", json.dumps(value), flush=True)
"""


def line_of(begin: str) -> str:
    """Return the line of the page that starts an example so."""
    page = (ROOT / "docs" / "engines.md").read_text()
    return next(line[2:] for line in page.splitlines() if line.startswith(f"$ {begin} "))


def example_on_ray(folder: Path, **variables: str) -> str:
    """Run the example on Ray as the page says, with a trace and 10 steps, and return what it prints."""
    words = shlex.split(line_of("overlap run --engine ray"), comments=True)
    trace = str(folder / "run.json")
    command = [sys.executable, "-m", *words[:2], "--trace", trace, *words[2:], "10"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    folder.mkdir(exist_ok=True)
    ended = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert f"overlap: trace in {trace}" in ended.stderr
    return ended.stdout


def top_of(job: str) -> tuple[dict[str, Any], str]:
    """Return the entry of a job in the list of `overlap top`, and what it shows of the job alone."""
    command = [sys.executable, "-m", "overlap", "top"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    listed, shown = (
        subprocess.run([*command, *more], cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
        for more in (["--list", "--json"], [job, "--once"])
    )
    return next(each for each in json.loads(listed) if each["job"] == job), shown
