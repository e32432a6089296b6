"""Groups of the same ranks in other orders: the results are right in any sequence of them, on both clocks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import overlap

from .permuted import KINDS, main

RANKS = (0, 1, 32, 33)  # on two nodes of trn1.32xlarge
ALIKE = (RANKS, RANKS[::-1], (1, 0, 33, 32), (32, 33, 0, 1))  # the same wires between the same places


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@example(orders=[[0, 1, 32, 33], [1, 0, 33, 32]], kinds=["reduce_scatter"], count=100_000)
@given(
    orders=st.lists(st.sampled_from(ALIKE) | st.permutations(RANKS), min_size=2, max_size=4),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    count=st.sampled_from([1, 100_000]),
)
def test_in_virtual_time(orders: list[list[int]], kinds: list[str], count: int) -> None:
    looked = overlap.run(main, orders, kinds, count, clock="virtual", cluster="trn1.32xlarge x2")
    assert looked[:2] == [len(kinds) * sum(rank in order for order in orders) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "count"),
    [
        ("efa", 1000),
        pytest.param("efa", 100_000, marks=pytest.mark.slow),
        pytest.param("shared_memory", 100_000, marks=pytest.mark.slow),
    ],
)
def test_between_processes(wire: str, count: int) -> None:
    program = str(Path(__file__).with_name("permuted.py"))
    words = ["run", "--processes", "2", "--ranks", "4", "--transport", wire, "--no-prefix", program, str(count)]
    ended = subprocess.run([sys.executable, "-m", "overlap", *words], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    looked = 6 * len(KINDS)
    assert ended.stdout.splitlines() == [f"[{looked}, {looked}]"] * 2
