"""The time, the order of tasks, and what happens to processes: all of it decided by a seed, and the same every time."""

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from overlap.runtime import backend, world
from overlap.runtime.event_loop import FairPauses
from overlap.simulation.faults import Fates, Faults

from .net import PROCESS, FakeSocket, Net, Process
from .raw import raw_sockets

# Of virtual time: far longer than all that may be waited for together (60 s to join, 15 s of silence, 10 s to leave).
HANG_S = 400.0

KINDS = ("kill", "cut", "silence", "late", "absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """What happens to one process.

    Attributes:
        kind: Of it.
        at_s: When.
        for_s: How long.
    """

    kind: str
    at_s: float
    for_s: float = 0.0


@dataclass(eq=False)
class Simulation:
    """One run.

    Attributes:
        seed: Of everything.
        members: How many processes.
        net: Between them.
        blows: What happens to which process.
        log: What was seen, with the time.
        ends: What became of each process: what its program returned, or its error; None if it was killed.
        over: All have ended.
        scopes: What each of them lives in.
        opened: All have their wires.
        broken: How many of these were broken.
    """

    seed: int
    members: int
    net: Net
    blows: dict[int, Blow]
    log: list[tuple[float, int, str]] = field(default_factory=list)
    ends: dict[int, object] = field(default_factory=dict)
    over: trio.Event = field(default_factory=trio.Event)
    scopes: dict[int, trio.CancelScope] = field(default_factory=dict)
    opened: trio.Event = field(default_factory=trio.Event)
    broken: int = 0

    def note(self, member: int, what: str) -> None:
        self.log.append((trio.current_time(), member, what))

    @property
    def hit(self) -> set[int]:
        return set(self.blows)


def seeds(everyday: int, slow: int, *, at_once: int) -> list[object]:
    """Return ranges of seeds to go through: few every day, more of them with the slow ones, or those of `SEEDS=A:B`."""
    told = os.environ.get("SEEDS")
    if told:
        first, _, last = told.partition(":")
        return [range(at, min(at + at_once, int(last))) for at in range(int(first), int(last), at_once)]
    more = [range(at, min(at + at_once, slow)) for at in range(everyday, slow, at_once)]
    return [range(everyday), *(pytest.param(each, marks=pytest.mark.slow) for each in more)]


Main = Callable[[Simulation, int], Awaitable[object]]


def simulate(
    seed: int,
    members: int,
    main: Main,
    *,
    around: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    spread_s: float = 5.0,
    kinds: tuple[str, ...] = KINDS,
    most: int = 2,
    cancel: tuple[int, int] | None = None,
) -> Simulation:
    """Run `main` as every process of a world.

    Args:
        seed: Decides everything.
        members: How many processes.
        main: Their program.
        around: What they share is open inside of it.
        spread_s: When things happen: from 0 to this.
        kinds: What may happen.
        most: To how many processes at most.
        cancel: A process, and before which step of its tasks it is cancelled, as by Ctrl-C.
    """
    chance = Random(f"{seed}, network")
    net = Net(chance, slowest_s=10 ** chance.uniform(-5, -1), pieces=chance.random() < 0.5)
    blows = dict(_drawn(Random(f"{seed}, blows"), members, spread_s, kinds, most))
    found = Simulation(seed, members, net, blows)
    instruments = []
    if cancel is not None:
        instruments.append(CancelAt(found, *cancel))
        blows[cancel[0]] = Blow(kind="cancel", at_s=0.0)
    with _naming(seed), Fates(Faults(seed=seed)).order_tasks(), _in_virtual_time(), raw_sockets(net):
        trio.run(_run, found, members, main, around, clock=MockClock(autojump_threshold=0), instruments=instruments)
    return found


def _drawn(chance: Random, members: int, spread_s: float, kinds: tuple[str, ...], most: int) -> Iterator[Any]:
    for member in sorted(chance.sample(range(members), chance.randint(0, min(most, members)))):
        at_s, for_s = chance.uniform(0, spread_s), 10 ** chance.uniform(-1, 1.5)
        yield member, Blow(kind=chance.choice(kinds), at_s=at_s, for_s=for_s)


class CancelAt(trio.abc.Instrument):
    """Cancels a process before the n-th step of its tasks; `left` is above 0 if it never came so far."""

    def __init__(self, found: Simulation, member: int, step: int) -> None:
        self.left, self._found, self._member = step, found, member

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        process = task.context.get(PROCESS)
        if process is not None and process.name == f"process {self._member}":
            self.left -= 1
            if self.left == 0:
                self._found.note(self._member, "cancelled")
                self._found.scopes[self._member].cancel()


@contextmanager
def _naming(seed: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"the seed was {seed}")
        raise


@contextmanager
def _in_virtual_time() -> Iterator[None]:
    """Let everybody who asks for the time in nanoseconds have that of Trio."""

    def now_ns() -> int:
        return round(trio.current_time() * 1e9)

    with pytest.MonkeyPatch.context() as patched:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ("overlap", "transports") and hasattr(module, "perf_counter_ns"):
                patched.setattr(module, "perf_counter_ns", now_ns)
        patched.setattr(
            backend, "FairPauses", partial(FairPauses, 0.0)
        )  # others' turns would come by the clock on the wall
        # a thread, which knows no virtual time
        patched.setattr(world, "make_world_watch", lambda *_, **__: nullcontext())
        yield


async def _run(
    found: Simulation, members: int, main: Main, around: Callable[[], AbstractAsyncContextManager[object]]
) -> None:
    trio.socket.set_custom_socket_factory(found.net)
    trio.socket.set_custom_hostname_resolver(found.net)
    before = trio.lowlevel.current_statistics().tasks_living
    processes = [Process(f"process {member}") for member in range(members)]
    with trio.move_on_after(HANG_S) as limit:
        async with around(), trio.open_nursery() as nursery, trio.open_nursery() as nemesis:
            for member, process in enumerate(processes):
                scope = found.scopes[member] = trio.CancelScope()
                nursery.start_soon(_live, found, process, member, main, scope)
                if member in found.blows:
                    nemesis.start_soon(_strike, found, process, member, scope)
            await found.over.wait()
            nemesis.cancel_scope.cancel()
    assert not limit.cancelled_caught, f"seed {found.seed} hangs: {found.blows}, {found.ends}"
    assert trio.lowlevel.current_statistics().tasks_living == before, f"seed {found.seed} leaves tasks"
    left = [each for process in processes for each in process.sockets if not each.closed]
    assert not left, f"seed {found.seed} leaves sockets: {left}"
    assert not found.net.listening


async def _live(found: Simulation, process: Process, member: int, main: Main, scope: trio.CancelScope) -> None:
    PROCESS.set(process)
    blow = found.blows.get(member)
    result: object = None
    with scope:
        if blow is not None and blow.kind in ("late", "absent"):
            await trio.sleep(blow.for_s if blow.kind == "late" else 70.0)
        try:
            if blow is None or blow.kind != "absent":
                result = await main(found, member)
        except Exception as error:
            result = error
    found.ends[member] = None if process.dead else result
    found.note(member, f"ended: {found.ends[member]!r}")
    if len(found.ends) == found.members:
        found.over.set()


async def _cut_rails(found: Simulation, process: Process, blow: Blow) -> None:
    """Break some connections, or all, but not those to the coordinator; again once all are back."""
    chance = Random(f"{found.seed}, rails")
    await found.opened.wait()
    while True:
        told = [sum(word in what for _, _, what in found.log) for word in ("was lost", "is back")]
        if told == [2 * found.broken] * 2:  # each is told at both ends
            links: dict[str, list[FakeSocket]] = {}
            for each in process.sockets:
                if not each.closed and each.out is not None and each.is_rail:
                    links.setdefault(each.out.receiver.name, []).append(each)
            for _, link in sorted(links.items()):
                for each in chance.sample(link, chance.randint(0, len(link))):
                    found.broken += 1
                    each.reset()
        await trio.sleep(chance.uniform(0, blow.for_s))


async def _strike(found: Simulation, process: Process, member: int, scope: trio.CancelScope) -> None:
    blow = found.blows[member]
    await trio.sleep(blow.at_s)
    found.note(member, blow.kind)
    if blow.kind == "kill":
        found.net.kill(process)
        scope.cancel()
    elif blow.kind == "cut":
        found.net.cut(process)
    elif blow.kind == "rails":
        await _cut_rails(found, process, blow)
    elif blow.kind == "silence":
        await found.net.silence(process, blow.for_s)
