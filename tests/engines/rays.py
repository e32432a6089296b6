"""A Ray cluster of several node processes on this machine, and what gangs leave on it, as a program of its own."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .clusters import IMPORTS, Driver, Witness, driving, ran, until

_NODE = {"object_store_memory": 80 << 20}
_TRIES = 4
_OF_RAY_TRAIN = "_AutoscalingCoordinatorActor"  # one for all later jobs of a cluster


_BEGIN = """
import overlap.ray

def run(main, *args, each=1, **options):
    return overlap.ray.run(main, *args, ranks_per_actor=each, **options)
"""


class RayCluster:
    """Node processes, the first of which cannot be lost.

    Attributes:
        variables: Environment of drivers. Their programs call `run(main, *args, each=1, **options)`, with `each` ranks
            in a process.
    """

    def __init__(self, *, head_cpus: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._cpus = cpus
        self._cluster = Cluster()
        self._added(num_cpus=head_cpus, include_dashboard=False)
        self.variables = {"RAY_ADDRESS": self._cluster.address}
        self.nodes = [self.add()]
        self._cluster.wait_for_nodes()
        self._witness = Witness("tests.engines.rays", self._cluster.address)

    def ran(self, folder: Path, text: str, *args: str) -> Driver:
        """Run a driver to its end."""
        return ran(folder, IMPORTS + _BEGIN + text, *args, **self.variables)

    def driving(self, folder: Path, text: str, *args: str) -> AbstractContextManager[Driver]:
        return driving(folder, IMPORTS + _BEGIN + text, *args, **self.variables)

    def is_clean(self) -> bool:
        """Wait until gangs have left nothing."""
        return bool(until(lambda: not any(self.left().values())))

    def left(self) -> dict[str, list[object]]:
        """Return the actors and placement groups of Ray that are not over, and processes of members."""
        found: dict[str, list[object]] = self._witness.ask()
        return found | {"members": members()}

    def logs(self) -> list[str]:
        folder = Path(self._cluster.head_node.get_session_dir_path()) / "logs"
        paths = [path for path in folder.rglob("*") if path.is_file()]
        assert len(paths) > 10
        return [path.read_text(errors="replace") for path in paths]

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


def members() -> list[object]:
    """Return the processes of actors of gangs."""
    told = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in told.splitlines() if "ray::MemberActor" in line]


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
