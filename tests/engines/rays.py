"""A Ray cluster of several node processes on this machine, and drivers of it as programs of their own."""

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
_NODE = {"object_store_memory": 80 << 20}
_TRIES = 4
_OF_RAY_TRAIN = "_AutoscalingCoordinatorActor"  # one for all later jobs of a cluster


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


class RayCluster:
    """Node processes, the first of which cannot be lost."""

    def __init__(self, *, head_cpus: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self._cluster = Cluster()
        self._added(num_cpus=head_cpus, include_dashboard=False)
        self.address: str = self._cluster.address
        self.nodes = [self.add()]
        self._cluster.wait_for_nodes()
        self._witness = Witness("tests.engines.rays", self.address)

    def left(self) -> dict[str, list[str]]:
        """Return the actors and placement groups of Ray that are not over."""
        found: dict[str, list[str]] = self._witness.ask()
        return found

    @property
    def session(self) -> Path:
        """The folder of its logs."""
        return Path(self._cluster.head_node.get_session_dir_path())

    def add(self) -> Any:
        return self._added(num_cpus=self._cpus)

    def _added(self, **settings: Any) -> Any:
        """Add a node; again if it is not up within the 30 s that Ray gives it, which a busy machine may not keep."""
        for _ in range(_TRIES):
            try:
                return self._cluster.add_node(**settings, **_NODE)
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
        raise AssertionError(f"no node of Ray came up in {_TRIES} tries")

    def lose(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._witness.close()
        self._cluster.shutdown()


class Driver:
    """A program that runs on a cluster."""

    def __init__(self, address: str, folder: Path, text: str, *args: str, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "driver.py"
        script.write_text(textwrap.dedent(text))
        environ = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"} | variables
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
def driving(address: str, folder: Path, text: str, *args: str, **variables: str) -> Iterator[Driver]:
    driver = Driver(address, folder, text, *args, **variables)
    try:
        yield driver
    finally:
        driver.close()


def ran(address: str, folder: Path, text: str, *args: str, **variables: str) -> Driver:
    """Run a driver to its end."""
    with driving(address, folder, text, *args, **variables) as driver:
        driver.wait()
    return driver


def line_of(begin: str) -> str:
    """Return the line of the page that starts an example so."""
    page = (ROOT / "docs" / "engines.md").read_text()
    return next(line[2:] for line in page.splitlines() if line.startswith(f"$ {begin} "))


def example_on(engine: str, folder: Path, **variables: str) -> str:
    """Run the example on an engine as the page says, with a trace and 10 steps, and return what it prints."""
    words = shlex.split(line_of(f"overlap run --engine {engine}"), comments=True)
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


def main(address: str) -> None:
    """Tell at each line of input which actors and placement groups are not over."""
    import ray

    ray.init(address, logging_level="error", log_to_driver=False)
    for _ in sys.stdin:
        groups = ray.util.placement_group_table().values()
        actors = ray._private.state.actors().values()
        left = {
            "groups": [each["state"] for each in groups if each["state"] != "REMOVED"],
            "actors": [
                each["ActorClassName"]
                for each in actors
                if each["State"] != "DEAD" and each["ActorClassName"] != _OF_RAY_TRAIN
            ],
        }
        print("TOLD", json.dumps(left), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
