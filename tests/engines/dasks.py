"""A Dask cluster of worker processes with nannies, as a program of its own: `python -m tests.engines.dasks`."""

import subprocess
import sys

from .rays import ROOT

WORKERS = 3


class DaskCluster:
    """Three workers of two threads each; nannies start new ones for those that are killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.engines.dasks"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address.startswith("tcp://")

    def close(self) -> None:
        self._process.communicate("")


def main() -> None:
    from distributed import LocalCluster

    with LocalCluster(n_workers=WORKERS, threads_per_worker=2, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
