"""When a stall is reported, and when a world is given up: decided from views of ranks, without any waiting."""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import pytest
import trio
from msgspec.structs import replace

from overlap.processes.control import ControlPlane
from overlap.processes.wire import BODY_LIMIT_BYTES, MessageError, Quiet, cut_views, decode_message, encode_message
from overlap.runtime.backend import RealBackend
from overlap.runtime.blame import stall as stall_watch
from overlap.runtime.blame.reports import Reports
from overlap.runtime.blame.stall import StallLimits, StallWatch
from overlap.runtime.blame.views import find_stall
from overlap.waits.ends import CallRecord, End, EndState, RankView, Seen
from overlap.waits.judge import Kind
from overlap.waits.wording import report_lines
from transports import delays

SLEEPS = "its program is at train.py:12"
REDUCE = CallRecord(op="all_reduce", key="dp", group="dp", site="train.py:9")


def waits(rank: int, *lacks: int, error: str = "", awaited: bool = True) -> RankView:
    call = replace(REDUCE, key=f"of rank {rank}")  # where the others have not arrived
    end = End(rank=rank, call=call, seq=3, state=EndState.WAITING, lacks=lacks, awaited=awaited)
    return RankView(rank=rank, ends=(end,), error=error)


def elsewhere(rank: int) -> RankView:
    return RankView(rank=rank, seen=Seen.ELSEWHERE, site="train.py:12")


def known(*views: RankView) -> dict[int, RankView]:
    return {view.rank: view for view in views}


@pytest.mark.parametrize(
    "views",
    [
        [],
        [elsewhere(0), elsewhere(1)],
        [waits(0, 1)],  # rank 1 moves
        [waits(0, 1), waits(1, 2)],  # rank 2 does
        [waits(0, 1, 2), elsewhere(1)],
    ],
)
def test_who_waits_for_ranks_that_move_is_not_stalled(views: list[RankView]) -> None:
    assert find_stall(known(*views), 3) is None


def test_ranks_that_can_never_go_on_are_stalled_although_a_third_one_moves() -> None:
    stall = find_stall(known(waits(0, 1, 2), waits(1, 0)), 3)
    assert stall is not None
    assert (stall.kind, stall.culprits, stall.is_certain) == (Kind.CYCLE, (0, 1), True)


def test_an_operation_that_a_rank_does_not_await_is_no_cycle() -> None:
    """Rank 0 awaits something of rank 2, beside what it has issued with rank 1."""
    both = replace(waits(0, 1, awaited=False), ends=(*waits(0, 1, awaited=False).ends, *waits(0, 2).ends))
    stall = find_stall(known(both, waits(1, 0), elsewhere(2)), 3)
    assert stall is not None
    assert (stall.kind, stall.culprits) == (Kind.LATE, (2,))


# -- when it is told -------------------------------------------------------------------------------------------------


class Rank:
    """A rank that makes progress when it is told to."""

    def __init__(self, view: RankView) -> None:
        self._view, self.progress = view, 0

    def progress_mark(self) -> tuple[object, int]:
        return None, self.progress

    def view(self, now_ns: int) -> RankView:
        return self._view

    @property
    def has_unseen_error(self) -> bool:
        return bool(self._view.error)


class Others:
    """The other processes."""

    def __init__(self, *, reports_for_all: bool, quiet: Mapping[int, RankView]) -> None:
        self.reports_for_all, self._quiet = reports_for_all, quiet
        self.told: list[list[int]] = []

    def send_quiet(self, views: object) -> None:
        assert isinstance(views, list)
        self.told.append([view.rank for view in views])

    def quiet_views(self) -> Mapping[int, RankView]:
        return self._quiet


class Times:
    """A stall watch whose clock is the test's, and what it says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *views: RankView, others: Others | None = None, **limits: float
    ):
        self.ranks = {view.rank: Rank(view) for view in views}
        self.said: list[str] = []
        self.given_up: list[float] = []
        self._now_ns, self.delay_ns = 10**15, 0
        monkeypatch.setattr(delays, "read_delays", lambda: {"1": self.delay_ns})
        monkeypatch.setattr(stall_watch, "perf_counter_ns", lambda: self._now_ns)
        monkeypatch.setattr(stall_watch, "notify", self.said.append)
        self._watch = StallWatch(self.ranks, StallLimits(**limits), others, self.given_up.append, size=2)

    def go_by(self, seconds: int, delay_s: float = 0.0) -> None:
        """Let time pass, in each second of which a thread waits for a processor for `delay_s`."""
        for _ in range(seconds):
            self._watch.look_for_stall()
            self._now_ns += 10**9
            self.delay_ns += round(delay_s * 1e9)
        self._watch.look_for_stall()


def test_a_known_error_ends_a_world_that_can_never_go_on_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, waits(0, 1, error="ValueError: no data at train.py:3"), waits(1, 0))
    times.go_by(20)
    assert times.given_up[:1] == [2.0]


def test_a_known_error_heads_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, waits(0, 1, error="ValueError: no data at train.py:3"), elsewhere(1))
    times.go_by(20)
    assert times.given_up == []
    assert times.said[0].splitlines()[1] == (
        "  rank 0 has an error that nobody has awaited: ValueError: no data at train.py:3"
    )


LATE = f"rank 1 has not come: {SLEEPS}; rank 0 waits for it in all_reduce #3 of group 'dp' (train.py:9)"
STALL = f"""\
no progress for 10 s: {LATE}
  rank 1: in its program, at train.py:12
  rank 0: all_reduce #3 of group 'dp' (train.py:9); waits for rank 1
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
        "no progress for 10 s: ranks 0-1 wait for each other and cannot go on: ranks 0-1 in all_reduce #3 of group "
        "'dp' (train.py:9); call the operations of all groups that ranks share in one order\n"
        "  rank 0: all_reduce #3 of group 'dp' (train.py:9); waits for rank 1\n"
        "  rank 1: all_reduce #3 of group 'dp' (train.py:9); waits for rank 0\n"
        "  the run is given up when that has lasted 300 s (--stall-timeout)"
    ]
    assert times.given_up == []
    times.go_by(1)
    assert times.given_up == [300.0]


def test_ranks_whose_wait_a_deadline_may_end_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, replace(waits(0, 1), may_end=True), waits(1, 0))
    times.go_by(1000)
    assert "wait for each other, and may yet go on" in times.said[0]
    assert times.given_up == []


def test_ranks_that_could_go_on_until_a_moment_ago_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a thread at work of one is about to issue an operation."""
    times = Times(monkeypatch, replace(waits(0, 1), may_end=True), waits(1, 0))
    times.go_by(1000)
    times.ranks[0]._view = waits(0, 1)
    times.go_by(280)
    assert times.given_up == []
    times.go_by(20)
    assert times.given_up[:1] == [300.0]


def test_time_in_which_a_process_waits_for_a_processor_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a load of 32 a processor, threads that never stop wait 31 of 32 seconds: ranks that work are left alone."""
    times = Times(monkeypatch, waits(0, 1), waits(1, 0))
    times.go_by(9600 - 1, delay_s=31 / 32)
    assert times.given_up == []
    times.go_by(1, delay_s=31 / 32)
    assert times.given_up == [300.0]


def test_a_limit_of_the_users_own_ends_any_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch, waits(0, 1), elsewhere(1), report_s=20.0, give_up_s=60.0)
    times.go_by(59)
    assert [line.splitlines()[-1] for line in times.said] == [
        "  the run is given up when that has lasted 60 s (--stall-timeout)"
    ]
    assert times.given_up == []
    times.go_by(1)
    assert times.given_up == [60.0]


def test_one_process_tells_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(reports_for_all=True, quiet=known(elsewhere(1)))
    times = Times(monkeypatch, waits(0, 1), others=others)
    times.go_by(11)
    assert (times.said, others.told) == ([], [[0]])  # those of the others have a moment to come
    times.go_by(1)
    assert times.said == [STALL]
    times.ranks[0].progress += 1
    times.go_by(1)
    assert others.told == [[0], []]


def test_a_process_reports_again_when_other_ranks_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(reports_for_all=False, quiet={})
    times = Times(monkeypatch, waits(0, 1, 2), others=others)
    times.go_by(20)
    assert others.told == [[0]]
    times.ranks[0]._view = waits(0, 2)
    times.go_by(20)
    assert others.told == [[0], [0]]


def test_the_others_only_let_it_know(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others(reports_for_all=False, quiet=known(elsewhere(1)))
    times = Times(monkeypatch, waits(0, 1), others=others)
    times.go_by(100)
    assert (times.said, others.told) == ([], [[0]])


# -- as processes tell it ----------------------------------------------------------------------------------------------


def heard(told: Sequence[RankView]) -> list[RankView]:
    body = encode_message(Quiet(views=cut_views(told, 0)))
    assert len(body) <= BODY_LIMIT_BYTES
    quiet = decode_message(body)
    assert isinstance(quiet, Quiet)
    return quiet.views


def test_views_arrive_as_they_were_told() -> None:
    told = [waits(0, 1, 2), elsewhere(1), RankView(rank=2, seen=Seen.LEFT)]
    assert heard(told) == told


def test_long_views_are_cut() -> None:
    call = CallRecord(
        op="recv", site="x" * 5000, key="k" * 900, name="é" * 900, members=tuple(range(512)), any_source=True
    )
    ends = tuple(End(rank=0, call=call, seq=n, lacks=tuple(range(500)), awaited=n == 8) for n in range(9))
    cut = heard([replace(elsewhere(rank), ends=ends, error="é" * 5000) for rank in range(512)])
    assert len(cut) == 128
    assert [end.seq for end in cut[0].ends] == [8]  # the one that it awaits
    assert cut[0].may_end
    assert (cut[0].ends[0].lacks, cut[0].ends[0].call.members) == (tuple(range(16)), ())


@pytest.mark.parametrize(
    "told", [3, {}, {"rank": 0}, ["0"], [0, "sleeps"], [0, "waits", [[0, 1]]], [0, "waits", [], 1], [True]]
)
def test_views_that_make_no_sense_are_refused(told: object) -> None:
    with pytest.raises(MessageError, match=r"^\d+ bytes that are no message of the control plane: "):
        decode_message(msgspec.msgpack.encode(["Quiet", [told]]))


@pytest.mark.parametrize("hangs", [False, True])
def test_an_interrupt_does_not_claim_that_ranks_can_never_go_on(hangs: bool) -> None:
    """One look cannot know that: what they wait for may be on its way. Who keeps the others can be seen at once."""
    reports = Reports([], RealBackend(), None)
    reports.stopped_views = [waits(0, 1), elsewhere(1) if hangs else waits(1, 0)]
    interrupt = KeyboardInterrupt()
    trio.run(reports.add_note_to, interrupt)
    lines = [f"  {line}" for line in report_lines(reports.stopped_views)]
    assert interrupt.__notes__ == ([f"  {LATE}"] if hangs else []) + lines


class Gathering(Others):
    """Other processes that report a rank of theirs as soon as they are asked."""

    async def wait_for_views(self, views_here: Sequence[RankView]) -> list[RankView]:
        await trio.lowlevel.checkpoint()
        return [*views_here, elsewhere(1)]


def test_the_notes_of_an_interrupt_name_ranks_of_other_processes() -> None:
    reports = Reports([], RealBackend(), cast(ControlPlane, Gathering(reports_for_all=True, quiet={})))
    reports.stopped_views = [waits(0, 1)]
    interrupt = KeyboardInterrupt()
    trio.run(reports.add_note_to, interrupt)
    lines = [f"  {line}" for line in report_lines([waits(0, 1), elsewhere(1)])]
    assert interrupt.__notes__ == [f"  {LATE}", *lines]
