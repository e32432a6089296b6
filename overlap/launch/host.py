"""Joining as member 0: listen, let the others in, and carry their messages for as long as the world lasts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from .door import Door
from .hub import Hub
from .invitation import Invitation, JoinError, name_processes
from .links import watch
from .membership import Membership
from .messages import Join
from .sockets import listen

__all__ = ["host"]

#: How long those who came may take to hear that the others did not.
_LAST_WORDS_S = 1.0
#: Reasons for which processes were not let in that the error repeats: one of them may be the missing one.
_TOLD_LIMIT = 3


async def host(invitation: Invitation, nursery: trio.Nursery, report: Callable[[str], None]) -> Membership:
    """Return when all members have joined.

    Args:
        invitation: Of member 0.
        nursery: Where the connections live; cancelling it closes them.
        report: Gets lines for the user.

    Raises:
        ListenError: Nobody can come, because this process cannot listen there.
        JoinError: Somebody did not come in time.
    """
    listener = await _listener(invitation)
    hub = Hub(members=invitation.members, detail=invitation.detail, report=report)
    door = Door(listener, hub, invitation.hello, secret=invitation.secret, tls=invitation.tls, report=report)
    membership = Membership(
        member=0,
        members=invitation.members,
        clock=None,
        post=partial(hub.handle, 0),
        room=trio.lowlevel.checkpoint,
        hang_up=door.hang_up,
    )
    nursery.start_soon(door.attend)
    nursery.start_soon(partial(watch, door.links, invitation.patience, report=report, lose=door.lose))
    hub.attach(0, membership.receive)
    hub.handle(0, Join(detail=invitation.detail))
    with trio.move_on_after(invitation.timeout_s):
        await _all_join(hub, invitation.progress_s, report)
    if not hub.complete:
        missing = hub.missing  # before those who came have heard it, and go
        reason = "; ".join(
            [f"{name_processes(missing)} did not join within {invitation.timeout_s:g} s"]
            + [f"process 0 {line}" for line in door.told[-_TOLD_LIMIT:]]
        )
        hub.refuse_all(reason)
        with trio.move_on_after(_LAST_WORDS_S):
            await door.hang_up()
        raise JoinError(reason, missing=missing)
    return membership


async def _listener(invitation: Invitation) -> trio.SocketListener:
    if invitation.listener is None:
        return await listen(invitation.endpoint)
    return trio.SocketListener(trio.socket.from_stdlib_socket(invitation.listener.dup()))


async def _all_join(hub: Hub, progress_s: float, report: Callable[[str], None]) -> None:
    while not hub.complete:
        with trio.move_on_after(progress_s) as pause:
            while not hub.complete:
                await hub.changed.wait()
        if pause.cancelled_caught and not hub.complete:
            missing = ", ".join(map(str, hub.missing))
            report(f"{len(hub.joined)} of {hub.members} joined; missing {missing}")
            hub.tell_who_is_missing()
    await trio.lowlevel.checkpoint()
