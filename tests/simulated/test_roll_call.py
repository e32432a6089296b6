"""Who takes part in the next attempt: whatever happens to launchers, those that are told are told the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from overlap.processes.identity import JoinError, RendezvousConfig
from overlap.processes.join import join_here
from overlap.processes.messages import Ready, encode
from overlap.processes.roll_call import Participation, call_roll
from overlap.processes.sockets import listen
from transports.handshake import welcome

from .net import PROCESS
from .simulation import Simulation, seeds, simulate

ENDPOINT = "10.0.0.1", 29500
SECRET = b"of this simulation"


async def launcher(found: Simulation, node: int, *, ranks_per_node: int = 1, **changes: object) -> Participation:
    common: dict[str, object] = {"job": "digits", "fewest": 2, "endpoint": ENDPOINT, "secret": SECRET}
    common |= {"member": node, "members": found.members, "timeout_s": 20.0, "epoch": 0 if node else 3}
    config = RendezvousConfig(**{**common, **changes})  # type: ignore[arg-type]
    return await call_roll(config, ranks_per_node, lambda line: found.note(node, line), pause_s=30.0)


def undisturbed(members: int, main: Callable[[Simulation, int], Awaitable[object]]) -> Simulation:
    return simulate(0, members, main, most=0)


@pytest.mark.parametrize("each", seeds(40, 1000, at_once=200))
def test_all_that_take_part_know_the_same(each: range) -> None:
    agreed = 0
    for seed in each:
        found = simulate(seed, 4, launcher, spread_s=10.0)
        present = [end for end in found.ends.values() if isinstance(end, Participation)]
        assert all(isinstance(end, (Participation, JoinError, type(None))) for end in found.ends.values()), found.ends
        assert len({(end.nodes, end.attempt) for end in present}) <= 1, f"seed {seed}: {found.ends}"
        indices = [end.index for end in present]
        assert len(set(indices)) == len(indices), f"seed {seed}: {found.ends}"
        assert all(end.nodes >= 2 for end in present)
        if not found.hit:
            assert found.ends == {node: Participation(index=node, nodes=4, attempt=3) for node in range(4)}
        agreed += len(present) > 1
    assert agreed > len(each) // 2


def test_those_who_are_there_are_enough_after_the_last_call() -> None:
    async def main(found: Simulation, node: int) -> object:
        if node == 1:
            return None
        return await launcher(found, node, timeout_s=18.0)

    found = undisturbed(3, main)
    assert found.ends == {
        0: Participation(index=0, nodes=2, attempt=3), 1: None, 2: Participation(index=1, nodes=2, attempt=3)
    }  # fmt: skip
    assert [line for _, _, line in found.log if line.startswith(("2 of", "goes"))] == [
        "2 of 3 nodes joined; missing 1",
        "goes on with 2 of 3 nodes: node 1 did not join within 9 s",
    ]


def test_too_few_are_told_so_everywhere() -> None:
    async def main(found: Simulation, node: int) -> object:
        if node > 1:
            return None
        return await launcher(found, node, fewest=3)

    found = undisturbed(4, main)
    message = "nodes 2, 3 did not join within 20 s; at least 3 of 4 must join"
    assert [str(found.ends[node]) for node in (0, 1)] == [message, f"node 0 at 10.0.0.1:29500: {message}"]
    assert all(isinstance(found.ends[node], JoinError) for node in (0, 1))


def test_a_launcher_that_is_stopped_does_not_count() -> None:
    async def main(found: Simulation, node: int) -> object:
        if node == 2:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(launcher, found, node)
                await trio.sleep(1)
                PROCESS.get().silent = True
                await trio.sleep(100)
                nursery.cancel_scope.cancel()
        return await launcher(found, node, timeout_s=60.0) if node == 0 else None

    error = undisturbed(3, main).ends[0]
    assert isinstance(error, JoinError)
    assert error.missing == (1, 2)
    assert str(error).startswith(
        "node 1 did not join within 60 s; node 2 had joined, and went away before all were there"
    )


def test_one_that_was_started_otherwise_is_told_so_at_once() -> None:
    async def main(found: Simulation, node: int) -> object:
        if node == 2:
            return await launcher(found, node, ranks_per_node=8)
        return await launcher(found, node)

    error = undisturbed(3, main).ends[2]
    assert isinstance(error, JoinError)
    assert str(error) == (
        "node 0 at 10.0.0.1:29500: process 2 has '--nnodes 2:3 and 8 ranks each', process 0 has '--nnodes 2:3 and 1 "
        "ranks each'; they must be the same"
    )


def test_two_launchers_of_one_node_are_not_two_nodes() -> None:
    async def main(found: Simulation, node: int) -> object:
        await trio.sleep(node)
        return await launcher(found, min(node, 1))

    found = undisturbed(3, main)
    assert (found.ends[0], found.ends[1]) == tuple(Participation(index=i, nodes=2, attempt=3) for i in (0, 1))
    assert isinstance(found.ends[2], JoinError)


def test_who_comes_while_a_world_runs_hears_of_it_and_waits() -> None:
    async def main(found: Simulation, node: int) -> object:
        if node:
            await trio.sleep(1)
            return await launcher(found, 1)
        alone = RendezvousConfig(job="digits", member=0, members=1, endpoint=ENDPOINT, secret=SECRET)
        async with join_here(alone, report=lambda line: found.note(0, line)):
            await trio.sleep(5)
        return await launcher(found, 0)

    found = undisturbed(2, main)
    assert found.ends == {node: Participation(index=node, nodes=2, attempt=3) for node in (0, 1)}
    (refused,) = [line for _, _, line in found.log if line.startswith("refused")]
    assert refused.endswith(": the world is running; node 1 can take part from the next attempt on")


def test_a_node_that_finds_nobody_says_what_it_tried() -> None:
    async def main(found: Simulation, node: int) -> object:
        return await launcher(found, 1, members=2)

    error = undisturbed(1, main).ends[0]
    assert str(error) == (
        "node 0 could not be reached at 10.0.0.1:29500 within 50 s: Connection refused; "
        "check that it runs, and that its port is open"
    )


@pytest.mark.parametrize(
    "answer",
    [
        Ready(process="", present=[0], attempt=3),
        Ready(process="", present=[0, 1, 2], attempt=3),
        Ready(process="", present=[-1, 1], attempt=3),
        Ready(process="", present=[0, 1], attempt=-1),
        Ready(process=""),
    ],
    ids=str,
)
def test_an_invalid_answer_is_refused(answer: Ready) -> None:
    async def main(found: Simulation, node: int) -> object:
        if node:
            return await launcher(found, 1)
        async with await listen(ENDPOINT) as listener, await listener.accept() as stream:
            await welcome(stream, SECRET, lambda theirs: theirs)
            await stream.send_all(encode(answer))
            await trio.sleep(1)
        return None

    error = undisturbed(2, main).ends[1]
    assert isinstance(error, JoinError)
    where = f"of nodes {answer.present} in attempt {answer.attempt}"
    assert str(error) == f"node 0 has sent an invalid roll call, {where}; this is a bug in overlap, please report it"
