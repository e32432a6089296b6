"""A process is cancelled at any step of its life, from joining to leaving: it ends, and the others know of whom."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

import overlap
from transports.handshake import HandshakeError

from .simulation import Simulation
from .test_worlds import EACH, live

LIMIT_S = 90.0  # of virtual time: 60 s to notice that somebody does not come, and what else may be waited for


async def short(rank: overlap.Rank) -> float:
    """Meet twice, in different ways."""
    await rank.barrier()
    rank.send(np.ones(2), (rank.rank + 1) % rank.world_size)
    got = await rank.recv(((2,), float), (rank.rank - 1) % rank.world_size)
    return float((await rank.all_reduce(got))[0])


def cancelled(member: int, step: int, rails: int) -> Simulation | None:
    """Return a run of two processes of which one is cancelled before a step; None if it has fewer."""
    found = live(step, 2, short, rails=rails, most=0, cancel=(member, step))
    return found if any(what == "cancelled" for _, _, what in found.log) else None


def check(found: Simulation, member: int) -> None:
    context = f"{found.seed}: {found.ends}"
    assert max(at_s for at_s, _, _ in found.log) < LIMIT_S, context
    other = found.ends[1 - member]
    if isinstance(other, overlap.RankFailedError):
        assert other.rank // EACH == member, context
    elif isinstance(other, HandshakeError):  # it went in the middle of one, for which there is one connection
        assert str(other).startswith("the other side hung up "), context
    elif isinstance(other, Exception):
        assert f"process {member} " in str(other) or f"process {member}:" in str(other), context
    else:
        assert other == [2.0 * EACH] * EACH, context


@pytest.mark.everyday(1)
@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rails", [0, 2])
@pytest.mark.parametrize("member", [0, 1])
def test_a_process_is_cancelled_at_any_step(member: int, rails: int, every: int) -> None:
    for step in count(1, every):
        found = cancelled(member, step, rails)
        if found is None:
            break
        check(found, member)
    assert step > 150  # of which there are fewer the fewer tasks a message takes
