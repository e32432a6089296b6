"""Who is to blame for a stall, and when it is told: decided from where the ranks stand, without any waiting."""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import pytest
import trio

from overlap.processes.codec import cut_standings
from overlap.processes.messages import BODY_LIMIT_BYTES, MessageError, Quiet, decode_event, encode_event
from overlap.runtime.backend import RealBackend
from overlap.runtime.blame import stall as stall_watch
from overlap.runtime.blame.reports import Reports
from overlap.runtime.blame.stall import StallLimits, StallWatch
from overlap.runtime.blame.standing import Standing, find_stall, report_lines
from transports import delays

SLEEPS = "whose program is at train.py:12"


def waits(rank: int, *awaits: int, busy: str = "") -> Standing:
    named = ", ".join(map(str, awaits))
    return Standing(rank=rank, lines=(f"all_reduce #3; waits for rank {named}",), awaits=awaits, busy=busy)


def elsewhere(rank: int, busy: str = SLEEPS) -> Standing:
    return Standing(rank=rank, lines=("has nothing issued",), busy=busy)


def known(*standings: Standing) -> dict[int, Standing]:
    return {standing.rank: standing for standing in standings}


SENTENCES = {
    "one is late": ([waits(0, 2), waits(1, 2), elsewhere(2), waits(3, 2)], f"ranks 0-1, 3 wait for rank 2, {SLEEPS}"),
    "two are late": ([waits(0, 1, 2), elsewhere(1), elsewhere(2)], f"rank 0 waits for ranks 1-2, {SLEEPS}"),
    "one of two late ones holds up more": (
        [waits(0, 3), waits(1, 3), waits(2, 4), elsewhere(3, "who is late"), elsewhere(4)],
        "ranks 0-2 wait for rank 3, who is late",
    ),
    "a chain": ([waits(0, 1), waits(1, 2), elsewhere(2)], f"ranks 0-1 wait for rank 2, {SLEEPS}"),
    "it waits as well, but is kept elsewhere": (
        [waits(0, 1), waits(1, 0, busy=SLEEPS)],
        f"rank 0 waits for rank 1, {SLEEPS}",
    ),
    "they wait for each other, and may go on": (
        [waits(0, 1, busy=SLEEPS), waits(1, 0, busy=SLEEPS)],
        "ranks 0-1 wait for each other",
    ),
    "a cycle": ([waits(0, 1), waits(1, 2), waits(2, 0)], "ranks 0-2 wait for each other, and none of them can go on"),
    "one that waits for itself": ([waits(0, 0), waits(1, 0)], "rank 0 waits for itself, and cannot go on"),
    "a cycle and one who waits for it": (
        [waits(0, 1), waits(1, 2), waits(2, 1)],
        "ranks 0-2 wait for each other, and none of them can go on",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_odd_one_out_is_named_in_one_sentence(case: str) -> None:
    standings, sentence = SENTENCES[case]
    stall = find_stall(known(*standings))
    assert stall is not None
    assert stall.sentence == sentence
    assert stall.hopeless == sentence.endswith(("none of them can go on", "rank 0 waits for itself, and cannot go on"))


@pytest.mark.parametrize(
    "standings",
    [
        [],
        [elsewhere(0), elsewhere(1)],
        [waits(0, 1)],  # rank 1 moves
        [waits(0, 1), waits(1, 2)],  # rank 2 does
        [waits(0, 1, 2), elsewhere(1)],
    ],
)
def test_who_waits_for_ranks_that_move_is_not_stalled(standings: list[Standing]) -> None:
    assert find_stall(known(*standings)) is None


def test_ranks_of_which_the_same_is_to_be_said_share_a_line() -> None:
    stall = find_stall(known(*(waits(rank, 64) for rank in range(64)), elsewhere(64), elsewhere(65)))
    assert stall is not None
    assert stall.table == ["ranks 0-63: all_reduce #3; waits for rank 64", "rank 64: has nothing issued"]


def test_a_long_table_is_cut() -> None:
    late = 40
    each = [Standing(rank=rank, lines=(f"recv #{rank}",), awaits=(late,)) for rank in range(late)]
    stall = find_stall(known(*each, elsewhere(late)))
    assert stall is not None
    assert stall.table[14:] == ["rank 14: recv #14", "rank 15: recv #15", "and 25 lines more"]


# -- when it is told -------------------------------------------------------------------------------------------------


class Rank:
    """A rank that makes progress when it is told to."""

    def __init__(self, standing: Standing) -> None:
        self._standing, self.progress = standing, 0

    def mark(self) -> tuple[object, int]:
        return None, self.progress

    def standing(self, now_ns: int) -> Standing:
        return self._standing

    @property
    def has_unseen_error(self) -> bool:
        return bool(self._standing.error)


class Others:
    """The other processes."""

    def __init__(self, *, speaks: bool, quiet: Mapping[int, Standing]) -> None:
        self.speaks, self._quiet = speaks, quiet
        self.told: list[list[int]] = []

    def send_quiet(self, standings: object) -> None:
        assert isinstance(standings, list)
        self.told.append([standing.rank for standing in standings])

    def quiet(self) -> Mapping[int, Standing]:
        return self._quiet


class Times:
    """A stall watch whose clock is the test's, and what it says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *standings: Standing, others: Others | None = None, **limits: float
    ):
        self.ranks = {standing.rank: Rank(standing) for standing in standings}
        self.said: list[str] = []
        self.given_up: list[float] = []
        self._now_ns, self.delay_ns = 10**15, 0
        monkeypatch.setattr(delays, "read_delays", lambda: {"1": self.delay_ns})
        monkeypatch.setattr(stall_watch, "perf_counter_ns", lambda: self._now_ns)
        monkeypatch.setattr(stall_watch, "notify", self.said.append)
        self._watch = StallWatch(self.ranks, StallLimits(**limits), others, self.given_up.append)

    def go_by(self, seconds: int, delay_s: float = 0.0) -> None:
        """Let time pass, in each second of which a thread waits for a processor for `delay_s`."""
        for _ in range(seconds):
            self._watch.look()
            self._now_ns += 10**9
            self.delay_ns += round(delay_s * 1e9)
        self._watch.look()


def test_a_known_error_ends_a_world_that_can_never_go_on_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Standing(rank=0, lines=("recv #0",), awaits=(1,), error="ValueError: no data at train.py:3")
    times = Times(monkeypatch, failed, Standing(rank=1, lines=("recv #0",), awaits=(0,)))
    times.go_by(20)
    assert times.given_up[:1] == [2.0]


def test_a_known_error_heads_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Standing(rank=0, lines=("recv #0",), awaits=(1,), error="ValueError: no data at train.py:3")
    times = Times(monkeypatch, failed, Standing(rank=1, lines=("has nothing issued",), busy=SLEEPS))
    times.go_by(20)
    assert times.given_up == []
    assert times.said[0].splitlines()[1] == (
        "  rank 0 has an error that nobody has awaited: ValueError: no data at train.py:3"
    )


STALL = f"""\
no progress for 10 s: rank 0 waits for rank 1, {SLEEPS}
  rank 0: all_reduce #3; waits for rank 1
  rank 1: has nothing issued
  the run waits on; Ctrl-C ends it, as --stall-timeout SECONDS would"""


def test_a_stall_is_told_once_and_its_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, waits(0, 1), elsewhere(1))
    times.go_by(9)
    assert times.said == []
    times.go_by(1)
    assert times.said == [STALL]
    times.go_by(1000)
    assert times.said == [STALL]
    times.ranks[1].progress += 1
    times.go_by(1)
    assert times.said[1:] == ["goes on, after 1010 s without progress"]
    assert times.given_up == []


def test_a_slow_run_is_told_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 15 s: it is told of once, for the next report takes twice as long."""
    times = Times(monkeypatch, waits(0, 1), elsewhere(1))
    for _ in range(100):
        times.go_by(15)
        times.ranks[1].progress += 1
    assert times.said == [STALL, "goes on, after 15 s without progress"]


def test_ranks_that_cannot_go_on_are_given_up_after_300_s(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, waits(0, 1), waits(1, 0))
    times.go_by(299)
    assert times.said == [
        "no progress for 10 s: ranks 0-1 wait for each other, and none of them can go on\n"
        "  rank 0: all_reduce #3; waits for rank 1\n"
        "  rank 1: all_reduce #3; waits for rank 0\n"
        "  the run is given up when that has lasted 300 s (--stall-timeout)"
    ]
    assert times.given_up == []
    times.go_by(1)
    assert times.given_up == [300.0]


def test_time_in_which_a_process_waits_for_a_processor_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a load of 32 a processor, threads that never stop wait 31 of 32 seconds: ranks that work are left alone."""
    times = Times(monkeypatch, waits(0, 1), waits(1, 0))
    times.go_by(9600 - 1, delay_s=31 / 32)
    assert times.given_up == []
    times.go_by(1, delay_s=31 / 32)
    assert times.given_up == [300.0]


def test_a_limit_of_the_users_own_ends_any_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, waits(0, 1), elsewhere(1), tell_s=20.0, give_up_s=60.0)
    times.go_by(59)
    assert [line.splitlines()[-1] for line in times.said] == [
        "  the run is given up when that has lasted 60 s (--stall-timeout)"
    ]
    assert times.given_up == []
    times.go_by(1)
    assert times.given_up == [60.0]


def test_one_process_tells_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(speaks=True, quiet=known(elsewhere(1)))
    times = Times(monkeypatch, waits(0, 1), others=others)
    times.go_by(11)
    assert (times.said, others.told) == ([], [[0]])  # those of the others have a moment to come
    times.go_by(1)
    assert times.said == [STALL]
    times.ranks[0].progress += 1
    times.go_by(1)
    assert others.told == [[0], []]


def test_the_others_only_let_it_know(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(speaks=False, quiet=known(elsewhere(1)))
    times = Times(monkeypatch, waits(0, 1), others=others)
    times.go_by(100)
    assert (times.said, others.told) == ([], [[0]])


# -- as processes tell it ----------------------------------------------------------------------------------------------


def heard(told: Sequence[Standing]) -> list[Standing]:
    body = encode_event(Quiet(standings=cut_standings(told)))
    assert len(body) <= BODY_LIMIT_BYTES
    quiet = decode_event(body)
    assert isinstance(quiet, Quiet)
    return quiet.standings


def test_standings_arrive_as_they_were_told() -> None:
    told = [waits(0, 1, 2), elsewhere(1)]
    assert heard(told) == told


def test_long_standings_are_cut() -> None:
    lines = tuple("é" * 1000 for _ in range(9))
    cut = heard([Standing(rank=rank, lines=lines, awaits=tuple(range(500)), busy="x" * 5000) for rank in range(512)])
    assert (len(cut), len(cut[0].lines), cut[0].awaits) == (128, 2, tuple(range(16)))
    assert (cut[0].lines[0], cut[0].busy) == ("é" * 31, "x" * 62)


@pytest.mark.parametrize(
    "told",
    [3, [], {}, {"rank": 0}, {"rank": "0", "lines": []}, {"rank": 0, "lines": [1]}, {"rank": 0, "lines": [], "busy": 1},
     {"rank": 0, "lines": [], "awaits": ["1"]}, {"rank": 0, "lines": [], "awaits": [True]}],
)  # fmt: skip
def test_standings_that_make_no_sense_are_refused(told: object) -> None:
    with pytest.raises(MessageError, match=r"^\d+ bytes that are no message: "):
        decode_event(msgspec.msgpack.encode(["Quiet", [told]]))


@pytest.mark.parametrize("hangs", [False, True])
def test_an_interrupt_does_not_claim_that_ranks_can_never_go_on(hangs: bool) -> None:
    """One look cannot know that: what they wait for may be on its way. Who keeps the others can be seen at once."""
    reports = Reports([], RealBackend(), None)
    reports.stood = [waits(0, 1), elsewhere(1) if hangs else waits(1, 0)]
    interrupt = KeyboardInterrupt()
    trio.run(reports.note_on, interrupt)
    lines = [f"  {line}" for line in report_lines(reports.stood)]
    assert interrupt.__notes__ == ([f"  rank 0 waits for rank 1, {SLEEPS}"] if hangs else []) + lines


class Gathering(Others):
    """Other processes that report a rank of theirs as soon as they are asked."""

    async def standings(self, standings_here: Sequence[Standing]) -> list[Standing]:
        await trio.lowlevel.checkpoint()
        return [*standings_here, elsewhere(1)]


def test_the_notes_of_an_interrupt_name_ranks_of_other_processes() -> None:
    reports = Reports([], RealBackend(), cast(stall_watch.Others, Gathering(speaks=True, quiet={})))
    reports.stood = [waits(0, 1)]
    interrupt = KeyboardInterrupt()
    trio.run(reports.note_on, interrupt)
    lines = [f"  {line}" for line in report_lines([waits(0, 1), elsewhere(1)])]
    assert interrupt.__notes__ == [f"  rank 0 waits for rank 1, {SLEEPS}", *lines]
