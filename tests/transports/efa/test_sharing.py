"""Which rail takes what, and how its speed is learned."""

from __future__ import annotations

import pytest

from transports.efa.sharing import RailRate, RailState, delays_chunk, delays_small_frame

MB = 10**6
CHUNK = 524288


def test_a_rate_is_what_was_delivered_while_enough_waited() -> None:
    pace = RailRate()
    assert pace.sample(0.0, 2 * MB, 2 * MB) == RailState(0.0, 2 * MB, sure=False)
    assert pace.sample(0.004, 2 * MB, MB).bytes_per_s == 0.0  # too soon to tell
    assert pace.sample(0.01, 2 * MB, MB) == RailState(100 * MB, MB)
    assert pace.sample(0.02, 4 * MB, 2_000_000).bytes_per_s == 100 * MB
    assert pace.sample(0.04, 8 * MB, 3_500_000).bytes_per_s == 125 * MB  # it may have been idle: no slower
    assert pace.sample(0.05, 8 * MB, 2_750_000).bytes_per_s == 100 * MB


def test_a_short_message_tells_that_a_rail_is_no_slower() -> None:
    pace = RailRate()
    pace.sample(0.0, MB, MB)
    assert pace.sample(0.0005, MB, 0).bytes_per_s == 0.0  # a switch may have had room for that much
    pace.sample(0.0, 2 * MB, MB)
    assert pace.sample(0.01, 2 * MB, 0) == RailState(100 * MB, 0, sure=False)
    pace.sample(0.02, 3 * MB, MB)
    assert pace.sample(0.07, 3 * MB, 0) == RailState(100 * MB, 0, sure=False)  # it may have been idle
    assert not pace.measures


def test_a_rate_of_a_busy_time_takes_the_place_of_a_guess() -> None:
    pace = RailRate()
    pace.sample(0.0, 2 * MB, MB)
    assert pace.measures
    pace.sample(0.01, 2 * MB, 0)
    pace.sample(0.0, 4 * MB, MB)
    assert pace.sample(0.01, 4 * MB, MB // 2) == RailState(50 * MB, MB // 2)


def test_the_last_packets_of_a_message_tell_nothing() -> None:
    pace = RailRate()
    pace.sample(0.0, 2 * MB, 2 * MB)
    pace.sample(0.01, 2 * MB, MB)
    pace.sample(0.02, 2 * MB, 1000)
    assert pace.sample(0.06, 2 * MB, 1000).bytes_per_s == 100 * MB


def test_a_rail_that_delivers_nothing_becomes_slow() -> None:
    pace = RailRate()
    pace.sample(0.0, 2 * MB, 2 * MB)
    pace.sample(0.01, 2 * MB, MB)
    rates = [pace.sample(0.01 * n, 2 * MB, MB).bytes_per_s for n in range(2, 6)]
    assert rates == [50 * MB, 25 * MB, 12.5 * MB, 6.25 * MB]


FAST, SLOW = 100 * MB, 10 * MB


@pytest.mark.parametrize(
    ("mine", "others", "due_bytes", "held"),
    [
        (RailState(SLOW, 0), [RailState(FAST, 0)], CHUNK, True),
        (RailState(SLOW, 0), [RailState(FAST, 0)], 20 * CHUNK, False),  # the other one is busy for longer
        (RailState(SLOW, CHUNK), [RailState(FAST, 0)], 15 * CHUNK, True),
        (RailState(FAST, 0), [RailState(SLOW, 0)], CHUNK, False),
        (RailState(FAST, MB), [RailState(FAST, 0)], CHUNK, True),  # equals share
        (RailState(FAST, CHUNK // 2), [RailState(FAST, 0)], CHUNK, False),
        (RailState(FAST, MB), [RailState(FAST, MB), RailState(SLOW, 0)], CHUNK, False),  # and no one that is slow does
        (RailState(0.0, MB), [RailState(0.0, 0)], CHUNK, True),
        (RailState(SLOW, 0, sure=False), [RailState(FAST, 0)], CHUNK, False),  # it may be as fast
        (RailState(SLOW, 0), [RailState(FAST, 0, sure=False)], CHUNK, True),
        (RailState(0.0, 0), [RailState(FAST, 0)], CHUNK, False),  # nobody knows yet
        (RailState(SLOW, 0), [RailState(0.0, 0)], CHUNK, False),
        (RailState(SLOW, 0), [RailState(FAST, MB), RailState(FAST, 2 * MB)], CHUNK, True),
        (RailState(SLOW, 0), [RailState(FAST, 8 * MB)], CHUNK, False),  # the other one is congested
    ],
)
def test_a_slow_rail_takes_a_chunk_only_if_it_comes_in_time(mine, others, due_bytes, held) -> None:
    assert delays_chunk(mine, others, due_bytes=due_bytes, chunk_bytes=CHUNK) is held


def test_small_frames_do_not_queue_on_a_slow_rail_while_a_fast_one_lives() -> None:
    assert delays_small_frame(RailState(SLOW, CHUNK), [RailState(FAST, CHUNK)])
    assert not delays_small_frame(RailState(SLOW, 0), [RailState(FAST, CHUNK)])
    assert not delays_small_frame(RailState(FAST, CHUNK), [RailState(SLOW, CHUNK)])
    assert not delays_small_frame(RailState(SLOW, CHUNK), [])
