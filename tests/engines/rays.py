"""A Ray cluster of several node processes on this machine, and drivers of it as programs of their own."""

import json
import os
import re
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


class RayCluster:
    """Node processes, the first of which cannot be lost."""

    def __init__(self, *, head_cpus: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": head_cpus, "include_dashboard": False, **_NODE}
        )
        self.address: str = self._cluster.address
        self.nodes = [self.add()]
        self._cluster.wait_for_nodes()

    @property
    def session(self) -> Path:
        """The folder of its logs."""
        return Path(self._cluster.head_node.get_session_dir_path())

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=self._cpus, **_NODE)

    def lose(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
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
                [sys.executable, str(script), *args], cwd=folder, env=environ, stdout=out, stderr=err
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
        return self.process.wait(TIMEOUT_S)

    def said(self, pattern: str) -> "re.Match[str]":
        """Wait until the program, or one of its ranks, has printed something."""
        return until(lambda: re.search(pattern, self.out + self.err), self)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def until(found: Callable[[], Any], of: object = "") -> Any:
    """Return what is found, as soon as it is."""
    for _ in range(10 * TIMEOUT_S):
        if value := found():
            return value
        time.sleep(0.1)
    told = f"{of.out}\n{of.err}" if isinstance(of, Driver) else str(of)
    raise AssertionError(f"not within {TIMEOUT_S} s:\n{told[-4000:]}")


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


def example_on(engine: str, folder: Path, **variables: str) -> str:
    """Run an example of the README on an engine by the command, and return what it prints."""
    command = [sys.executable, "-m", "overlap", "run", "--engine", engine, "--ranks", "2", "--trace", "run.json"]
    program = [str(ROOT / "examples" / "11_data_parallel.py"), "10"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    folder.mkdir(exist_ok=True)
    ended = subprocess.run(
        [*command, *program], cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "overlap: trace in run.json" in ended.stderr
    return ended.stdout
