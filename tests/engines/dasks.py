"""A Dask cluster of worker processes with nannies, as a program of its own: `python -m tests.engines.dasks`."""

import json
import sys
import threading
from typing import Any, ClassVar

from .clusters import Engine, Witness

WORKERS = 4  # as many as the example has ranks


class DaskCluster(Engine):
    """Workers of two threads each; nannies start new ones for those that are killed."""

    name = "dask"
    begin = """
import distributed
import overlap.dask

client = distributed.Client(os.environ["DASK_SCHEDULER_ADDRESS"])
client.wait_for_workers(4)

def run(main, *args, each=1, **options):
    return overlap.dask.run(client, main, *args, ranks_per_worker=each, **options)

def logs():
    found = client.get_scheduler_logs(), client.get_worker_logs(), client.get_worker_logs(nanny=True)
    return [str(text) for text in (*found, client.get_events())]
"""
    nothing: ClassVar[list[object]] = [{"tasks": [], "unrunnable": [], "variables": [], "leases": []}, [[]] * WORKERS]
    dead = "its process on Dask"
    per_process = "ranks_per_worker"
    prints = False
    too_much = ("ranks=6", "6 workers", "2 more workers")
    fault_period = 10

    def __init__(self) -> None:
        self._witness = Witness("tests.engines.dasks")
        self.variables = {"DASK_SCHEDULER_ADDRESS": self._witness.ask("address")}

    def left(self) -> Any:
        """Return what gangs have left on the scheduler, and their threads on workers."""
        return self._witness.ask()

    def close(self) -> None:
        self._witness.close()


def on_scheduler(dask_scheduler: Any) -> dict[str, list[str]]:
    return {
        "tasks": [str(key) for key in dask_scheduler.tasks if "overlap" in str(key)],
        "unrunnable": [str(each) for each in dask_scheduler.unrunnable],
        "variables": [name for name in dask_scheduler.extensions["variables"].variables if "overlap" in name],
        "leases": [name for name, held in dask_scheduler.extensions["semaphores"].leases.items() if held],
    }


def on_worker() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("overlap")]


def main() -> None:
    """Tell the address of the scheduler, or what gangs have left, at each line of input."""
    import dask
    from distributed import Client, LocalCluster

    # After 15 s a local cluster gives up a worker that its nanny starts again, which takes longer on a busy machine.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        for line in sys.stdin:
            told: Any = cluster.scheduler_address
            if line.strip() == "left":
                told = [
                    client.run_on_scheduler(on_scheduler),
                    sorted(client.run(on_worker, on_error="ignore").values()),
                ]
            print("TOLD", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
