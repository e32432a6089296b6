"""Warm routes have no more files and calls than `routes.LIMITS` allows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .routes import LIMITS, Count, routes_of_one_process, routes_of_processes


def check(counts: dict[str, Count], names: set[str]) -> None:
    assert set(counts) == names
    longer = {
        route: count
        for route, count in counts.items()
        if count.files > LIMITS[route].files or count.calls > LIMITS[route].calls
    }
    assert not longer, "longer than their limits"


def test_routes_of_one_process() -> None:
    elsewhere = {route for route in LIMITS if "between" in route or "torch" in route}
    check(routes_of_one_process(), set(LIMITS) - elsewhere)


def test_routes_between_processes(tmp_path: Path) -> None:
    check(routes_of_processes(tmp_path), {route for route in LIMITS if "between" in route})


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_routes_of_torch(tmp_path: Path) -> None:
    check(routes_of_processes(tmp_path, torch=True), {route for route in LIMITS if "torch" in route})
