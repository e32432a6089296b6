"""Random programs: right results, every operation ended, errors that name the planted fault, and nothing left."""

import asyncio
import gc
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import overlap
from overlap.errors import type_name
from tests.embedded.connecting import connected

from .random_programs import FAULTS, Player, Program, Step, program_of
from .reference import Array
from .worlds import TIMEOUT_S

STOP_S = {"real": 0.1, "virtual": 50.0}  # time limit of a world whose program stalls
SEARCH_S = 60.0  # of the search for a smaller program that fails, too
# Faults after which a world may end well, because no rank waits for what has failed.
HARMLESS = (None, "leave", "abort", "cancel")
CONNECTED = {"task": "raise", "nursery": "raise", "interrupt": "raise", "stall": "raise"}  # threads have no loop


# -- runs --------------------------------------------------------------------------------------------------------------


def run_world(program: Program, players: list[Player], clock: str) -> None:
    """Run a program on the ranks of one process."""

    async def main(rank: overlap.Rank) -> None:
        players.append(player := Player(rank, program, threads=clock == "real"))
        await player.run()

    timeout_s = STOP_S[clock] if program.fault == "stall" else TIMEOUT_S
    overlap.run(main, ranks=program.size, clock=clock, timeout_s=timeout_s)


class AsyncioPlayer(Player):
    """A rank whose program runs on asyncio, in a thread of its own."""

    has_tasks = False
    sleep = staticmethod(asyncio.sleep)
    in_thread = staticmethod(asyncio.to_thread)

    async def wait_briefly(self, future: overlap.Future[object], seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await future
                return True
        return False


def run_connected(program: Program, players: list[Player]) -> None:
    """Run a program on ranks that connect as processes do, each in a thread."""

    def live(world: overlap.Connection) -> None:
        players.append(player := AsyncioPlayer(world.rank, program))
        asyncio.run(player.run())

    connected(live, program.size, transport="efa" if program.seed % 2 else None)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def complaints(program: Program, mode: str) -> list[str]:
    """Run a program, and return what is wrong with its results and errors, and with the arrays that it loaned."""
    players, found = list[Player](), list[str]()
    try:
        if mode == "connect":
            program = replace(program, fault=CONNECTED.get(program.fault or "", program.fault))
            run_connected(program, players)
        else:
            run_world(program, players, mode)
        if program.fault not in HARMLESS:
            found.append("ended well despite its fault")
    except BaseException as error:  # a Ctrl-C is one of the faults
        if text := unexplained(program, error):
            found.append(f"raised {text}")
    for player in players:
        ends = [(step, mistake(player, step, future)) for step, future in player.issued]
        found += [f"rank {player.me}, {step}: {text}" for step, text in ends if text]
        found += [f"{each!r} has a result" for each in player.cancelled if not each.cancelled()]
        for loaned, before in player.loaned:
            inputs.append((program.seed, weakref.ref(loaned)))
            if not loaned.flags.writeable or not np.array_equal(loaned, before):
                found.append(f"rank {player.me}: a loaned array is locked, or has changed")
    return found


inputs: list[tuple[int, weakref.ref[Array]]] = []


@pytest.fixture(autouse=True, scope="module")
def _no_memory_is_kept() -> Iterator[None]:
    yield
    for _ in range(2):  # the first collection calls finalizers
        gc.collect()
    assert not {seed for seed, array in inputs if array() is not None}


def unexplained(program: Program, error: BaseException) -> str | None:
    """Return the text of an error and of its causes, unless they name the planted fault and its rank alone."""
    found = [*causes(error)]
    text = " <- ".join(f"{type_name(each)}: {each}" for each in found)
    if program.fault is None:
        return text
    expected = FAULTS[program.fault].format(seed=program.seed, culprit=program.culprit)
    if not re.search(expected, text):
        return text
    blamed = {each.culprit for each in found if isinstance(each, overlap.PeerError)}
    blamed |= {each.rank for each in found if isinstance(each, overlap.RankFailedError)}
    return text if expected.startswith("Planted") and blamed - {program.culprit} else None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all that have caused it."""
    if error is not None:
        yield error
        for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from causes(each)
        yield from causes(error.__cause__)


def mistake(player: Player, step: Step, future: overlap.Future[object]) -> str | None:
    """Return what is wrong with the end of an operation, if anything is."""
    try:
        error = future.exception(0.0)
    except TimeoutError as not_ended:
        return str(not_ended)
    if error is not None:
        return unexplained(player.program, error)
    got, expected = future.result(0.0), step.results.get(player.me)
    return None if facts(got) == facts(expected) else f"got {got!r}, expected {expected!r}"


def facts(array: Array | None) -> object:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def smallest(program: Program, mode: str) -> Program:
    """Leave out steps, and all that use their results, as long as the program still fails."""
    until_s = time.monotonic() + SEARCH_S
    for number in sorted(program.steps, reverse=True):
        left_out = {number}
        for step in program.steps.values():
            if step.source and step.source[0] in left_out:
                left_out.add(step.number)
        steps = {step.number: step for step in program.steps.values() if step.number not in left_out}
        smaller = replace(program, steps=steps)
        if time.monotonic() < until_s and complaints(smaller, mode):
            program = smaller
    return program


# -- tests -------------------------------------------------------------------------------------------------------------


def of_seeds(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a test so many seeds: those of the profile, or fresh ones."""
    every = settings(max_examples=count, phases=[Phase.generate])  # a seed cannot be shrunk, but its program can
    return lambda test: every(given(seed=st.integers(0, (1 << 32) - 1))(test))


def check(seed: int, mode: str) -> None:
    program = program_of(seed)
    if found := complaints(program, mode):
        pytest.fail("\n".join([f"{mode}: {smallest(program, mode)}", *found]))


@pytest.mark.parametrize("mode", ["real", "virtual"])
@of_seeds(40)
def test_programs(seed: int, mode: str) -> None:
    check(seed, mode)


@of_seeds(10)
def test_programs_of_connections(seed: int) -> None:
    check(seed, "connect")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("mode", ["real", "virtual", "connect"])
@of_seeds(100)
def test_many_programs(seed: int, mode: str, part: int) -> None:
    check(seed + part, mode)  # each part gets the same seeds
