"""The states of operations: the table, what is refused, and the same states in every world."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap
from overlap.runtime.message import Message
from overlap.runtime.state import (
    CANCELLED,
    CANCELLING,
    DONE,
    FAILED,
    ISSUED,
    MATCHING,
    PARKED,
    STOPPING,
    TABLE,
    UNWANTED,
    OperationState,
    TransitionError,
)  # fmt: skip
from overlap.testing import Ranks
from tests.errors import error_of
from tests.interpreters import Python
from tests.runtime.cancelled_awaits import play

from . import conformance
from .conformance import transition

TIMEOUT_S = conformance.TIMEOUT_S
WIRES = {"memory": [], "sockets": ["--transport", "efa"]}
DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"


def reachable(start: OperationState) -> set[OperationState]:
    found, ahead = {start}, [start]
    while ahead:
        for after in TABLE[ahead.pop()]:
            if after not in found:
                found.add(after)
                ahead.append(after)
    return found


def test_every_state_can_be_reached_and_every_other_leads_to_each_end() -> None:
    assert reachable(ISSUED) == set(OperationState)
    for state in OperationState:
        if state < DONE and state is not STOPPING:
            assert {DONE, FAILED, CANCELLED} <= reachable(state)
    assert reachable(FAILED) == {FAILED}
    assert reachable(CANCELLED) == {CANCELLED}
    assert DONE not in reachable(STOPPING)  # it has failed
    assert [state for state in OperationState if state >= DONE] == [DONE, FAILED, CANCELLED]


@given(st.lists(st.sampled_from(OperationState), max_size=30))
def test_an_operation_only_moves_as_the_table_says(asked: list[OperationState]) -> None:
    state = ISSUED
    for after in asked:
        if after in TABLE[state]:
            state = transition(state, after)
            assert state is after
        else:
            error = error_of(TransitionError, transition, state, after)
            assert (error.before, error.after) == (state, after)


def test_the_page_has_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", DOCS.read_text(encoding="utf-8"), re.M)
    words = {state.word: tuple(after.word for after in TABLE[state]) for state in OperationState}
    found = {word: tuple(re.findall(r"`(\w+)`", after)) for word, after in rows if word in words}
    assert found == words


@pytest.mark.parametrize("where", ["program", "compute"])
def test_a_state_that_may_not_follow_ends_the_rank_with_both_names(clock: Any, where: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            total = rank.all_reduce(np.ones(1))
            await total
            if where == "program":
                total._enter(MATCHING)
            else:
                await rank.compute(total._enter, MATCHING, seconds=0.1)
        else:
            await rank.all_reduce(np.ones(1))
        await rank.barrier()

    line = main.__code__.co_firstlineno + 2
    error = error_of(overlap.RankFailedError, overlap.run, main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
    said = f"all_reduce #0 on group 'world' (tests/runtime/test_states.py:{line}) of rank 1 "
    assert f"TransitionError: {said}is done and cannot become matching: this is a bug in overlap" in str(error)


def _receives(operation: object) -> bool:
    return isinstance(operation, Message) and operation.receives


def test_whatever_is_cancelled_an_operation_ends_and_only_receives_are_left(clock: Any) -> None:
    for seed in range(10):
        with conformance.recorded() as states:
            overlap.run(play, seed, 1e-4, ranks=2, clock=clock, cluster="trn1.32xlarge", timeout_s=TIMEOUT_S)
        assert states.passed
        for operation, passed in states.passed.items():
            assert passed[-1] is operation.state
            assert operation.state >= DONE or (operation.state is PARKED and _receives(operation))
            assert _receives(operation) or not {UNWANTED, CANCELLING, PARKED} & set(passed)


def test_the_states_are_the_same_on_both_clocks(clock: Any) -> None:
    with conformance.recorded() as states:
        overlap.run(conformance.program, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
    states.check()


def test_the_states_are_the_same_for_all_seeds_of_a_test(ranks: Ranks) -> None:
    with conformance.recorded() as states:
        ranks.run(conformance.program, ranks=2, seeds=10)
    states.check()


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_the_states_are_the_same_between_processes(wire: str, tmp_path: Path) -> None:
    command = ["-m", "overlap", "run", "--processes", "2", *WIRES[wire], conformance.__file__]
    with Python(*command, cwd=tmp_path) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
