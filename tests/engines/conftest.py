"""Clusters of the tests here."""

from collections.abc import Iterator

import pytest

from .rays import RayCluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two nodes of three processors each; tests that lose one add one."""
    cluster = RayCluster(head_cpus=3, cpus=3)
    yield cluster
    cluster.close()
