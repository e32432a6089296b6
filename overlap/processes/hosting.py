"""Joining as member 0: listen, let the others in, and carry their messages for as long as the world lasts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from .coordinator import Coordinator
from .host import Acceptor
from .identity import JoinError, RendezvousConfig, name_absent
from .link import watch
from .member import Membership
from .messages import Join
from .sockets import listen

#: How long those who came may take to hear that the others did not.
_LAST_WORDS_S = 1.0
#: Reasons for which processes were not let in that the error repeats: one of them may be the missing one.
_TOLD_LIMIT = 3


async def join_as_host(config: RendezvousConfig, nursery: trio.Nursery, report: Callable[[str], None]) -> Membership:
    """Return when all members have joined.

    Args:
        config: Of member 0.
        nursery: Where the connections live; cancelling it closes them.
        report: Gets lines for the user.

    Raises:
        ListenError: Nobody can come, because this process cannot listen there.
        JoinError: Somebody did not come in time.
    """
    listener = await _listener(config)
    coordinator = Coordinator(members=config.members, detail=config.detail, report=report, process=config.process)
    acceptor = Acceptor(
        listener,
        coordinator,
        config.hello,
        secret=config.secret,
        tls=config.tls,
        report=report,
        outage_s=config.patience.outage_s,
    )
    membership = Membership(
        member=0,
        members=config.members,
        clock=None,
        post=partial(coordinator.handle, 0),
        room=trio.lowlevel.checkpoint,
        hang_up=acceptor.hang_up,
    )
    nursery.start_soon(acceptor.attend)
    watching = partial(watch, acceptor.links, config.patience, report=report, lose=acceptor.lose, name=config.name)
    nursery.start_soon(watching)
    coordinator.attach(0, membership.receive)
    coordinator.handle(0, Join(detail=config.detail, process=config.process))
    with trio.move_on_after(config.timeout_s):
        await _all_join(coordinator, config.progress_s, report)
    if not coordinator.complete:
        missing = coordinator.missing  # before those who came have heard it, and go
        reason = "; ".join(
            [name_absent(missing, sorted(coordinator.went), config.timeout_s)]
            + [f"process 0 {line}" for line in acceptor.told[-_TOLD_LIMIT:]]
        )
        coordinator.refuse_all(reason)
        with trio.move_on_after(_LAST_WORDS_S):
            await acceptor.hang_up()
        raise JoinError(reason, missing=missing)
    return membership


async def _listener(config: RendezvousConfig) -> trio.SocketListener:
    if config.listener is None:
        return await listen(config.endpoint)
    return trio.SocketListener(trio.socket.from_stdlib_socket(config.listener.dup()))


async def _all_join(coordinator: Coordinator, progress_s: float, report: Callable[[str], None]) -> None:
    while not coordinator.complete:
        with trio.move_on_after(progress_s) as pause:
            while not coordinator.complete:
                await coordinator.changed.wait()
        if pause.cancelled_caught and not coordinator.complete:
            missing = ", ".join(map(str, coordinator.missing))
            report(f"{len(coordinator.joined)} of {coordinator.members} joined; missing {missing}")
            coordinator.tell_who_is_missing()
    await trio.lowlevel.checkpoint()
