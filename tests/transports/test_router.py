"""The router: who is reached over what."""

from __future__ import annotations

import pytest
import trio

from transports import ArgumentError, NeuronLink, Recording, Router


def parts() -> tuple[NeuronLink, Recording]:
    """Rank 0 and 1 in memory; the same two, and no others, over a wire that writes down what it sends."""
    return NeuronLink([0, 1]), Recording(NeuronLink([0, 1]))


def test_the_first_part_that_reaches_a_rank_carries_the_message() -> None:
    memory, wire = parts()
    memory.peers = (0,)  # rank 1 is elsewhere

    async def main() -> None:
        async with Router([memory, wire]).open() as router, trio.open_nursery() as nursery:
            out = bytearray(1)
            nursery.start_soon(router.endpoint(0).send, 0, 5, b"a")
            await router.endpoint(0).recv_into(0, 5, out)
            nursery.start_soon(router.endpoint(0).send, 1, 6, b"b")
            with await wire.endpoint(1).recv(0, 6, 1) as delivery:
                out += delivery.view
        assert out == b"ab"

    trio.run(main)
    assert [(sent.dst, sent.tag) for sent in wire.sent] == [(1, 6)]


def test_it_shows_what_it_is_made_of() -> None:
    memory, wire = parts()
    router = Router([memory, wire])
    assert (router.ranks, router.peers, router.shares_memory([0, 1])) == ((0, 1), (0, 1), True)
    assert not Router([wire, memory]).shares_memory([0, 1])


def test_a_group_that_reaches_into_another_process_shares_no_memory() -> None:
    near, far = NeuronLink([0, 1]), NeuronLink([0, 1])
    far.peers = (2, 3)
    router = Router([near, far])
    assert router.peers == (0, 1, 2, 3)
    assert [router.shares_memory(ranks) for ranks in ([0, 1], [1], [0, 2], [2, 3], [0, 1, 2, 3])] == [
        *(True, True),
        *(False, False, False),
    ]

    assert router.statistics().unmatched_sends == ()


def test_what_it_cannot_reach_is_named() -> None:
    memory, _ = parts()
    with pytest.raises(ArgumentError, match=r"^there is no rank 7 here; this router serves ranks 0, 1$"):
        Router([memory]).endpoint(7)
    with pytest.raises(ArgumentError, match="name transports of the same local ranks"):
        Router([])
    with pytest.raises(ArgumentError, match="name transports of the same local ranks"):
        Router([memory, NeuronLink(3)])

    async def main() -> None:
        with pytest.raises(ArgumentError, match=r"^rank 0 cannot reach rank 9; this router reaches ranks 0, 1$"):
            await Router([memory]).endpoint(0).send(9, 0, b"")

    trio.run(main)
