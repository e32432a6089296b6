"""Large and slow reductions: they leave the event loop, in pieces, and nothing is left running."""

import threading
from collections.abc import Iterator
from functools import partial

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap.runtime.engine import real_engine
from overlap.runtime.engine.workers import Workers

# -- the threads behind large reductions: every piece once, the urgent job first, errors kept, nothing left running ----

TIMEOUT_S = 60.0


class Jobs:
    """Submits to a pool and knows what ran and what ended."""

    def __init__(self, threads: int) -> None:
        self.workers = Workers(threads)
        self.ran: list[str] = []
        self.ended: dict[str, BaseException | None] = {}
        self.ends: list[tuple[str, int]] = []  # and how many pieces had run by then
        self.gate, self._all = threading.Event(), threading.Condition()

    def submit(self, name: str, pieces: int, priority: int = 0) -> None:
        self.workers.submit([partial(self.ran.append, name)] * pieces, partial(self.end, name), priority=priority)

    def hold(self) -> None:
        """Keep one thread busy until the gate opens; return once it is."""
        busy = threading.Event()

        def piece() -> None:
            busy.set()
            self.gate.wait(TIMEOUT_S)

        self.workers.submit([piece], partial(self.end, "held"), priority=-100)
        assert busy.wait(TIMEOUT_S)

    def end(self, name: str, error: BaseException | None) -> None:
        with self._all:
            self.ends.append((name, self.ran.count(name)))
            self.ended[name] = error
            self._all.notify_all()

    def wait(self, *names: str) -> None:
        with self._all:
            assert self._all.wait_for(lambda: set(names) <= set(self.ended), TIMEOUT_S)


@pytest.fixture(params=[1, 2, 5])
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    made = Jobs(request.param)
    yield made
    made.gate.set()
    made.workers.close()


@pytest.fixture
def one_thread() -> Iterator[Jobs]:
    made = Jobs(1)
    yield made
    made.gate.set()
    made.workers.close()


def test_every_piece_runs_once_and_the_end_comes_after_the_last(jobs: Jobs) -> None:
    for i in range(20):
        jobs.submit(str(i), i + 1)
    jobs.wait(*map(str, range(20)))
    assert sorted(jobs.ran) == sorted(str(i) for i in range(20) for _ in range(i + 1))
    assert sorted(jobs.ends) == sorted((str(i), i + 1) for i in range(20))
    assert set(jobs.ended.values()) == {None}


def test_a_job_without_pieces_is_done_at_once(jobs: Jobs) -> None:
    jobs.submit("none", 0)
    assert jobs.ended == {"none": None}


def test_the_most_urgent_goes_first_and_the_oldest_among_equals(one_thread: Jobs) -> None:
    one_thread.hold()
    for name, priority in (("bulk", 5), ("a", 0), ("urgent", -3), ("b", 0)):
        one_thread.submit(name, 2, priority)
    one_thread.gate.set()
    one_thread.wait("bulk", "a", "urgent", "b")
    assert one_thread.ran == ["urgent"] * 2 + ["a"] * 2 + ["b"] * 2 + ["bulk"] * 2


def test_an_urgent_job_overtakes_at_the_next_piece(one_thread: Jobs) -> None:
    jobs = one_thread
    pieces = [
        partial(jobs.ran.append, "first"),
        partial(jobs.submit, "urgent", 1, -1),
        partial(jobs.ran.append, "last"),
    ]
    jobs.workers.submit(pieces, partial(jobs.end, "large"), priority=0)
    jobs.wait("large", "urgent")
    assert jobs.ran == ["first", "urgent", "last"]


def test_an_error_is_handed_over_when_all_pieces_have_run(jobs: Jobs) -> None:
    def boom() -> None:
        raise ArithmeticError("on purpose")

    jobs.workers.submit(
        [partial(jobs.ran.append, "x"), boom, partial(jobs.ran.append, "x")], partial(jobs.end, "bad"), priority=0
    )
    jobs.submit("good", 3)
    jobs.wait("bad", "good")
    assert isinstance(jobs.ended["bad"], ArithmeticError)
    assert jobs.ended["good"] is None
    assert sorted(jobs.ran) == ["good"] * 3 + ["x"] * 2


def test_closing_lets_the_jobs_finish_and_ends_the_threads(one_thread: Jobs) -> None:
    one_thread.hold()
    one_thread.submit("queued", 5)
    one_thread.gate.set()
    one_thread.workers.close()
    assert one_thread.ended == {"held": None, "queued": None}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("overlap-reduce")]


def test_closing_an_unused_pool_starts_nothing() -> None:
    before = set(threading.enumerate())
    Workers(4).close()
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may end meanwhile


# -- reductions that would keep the event loop from its work go to threads, whatever they cost for each byte -----------

R = overlap.Rank


@pytest.mark.parametrize(
    ("dtype", "elements", "threads"),
    [
        ("float32", 1 << 18, False),  # 1 MiB takes 0.03 ms
        ("bfloat16", 1 << 18, True),  # 512 KiB take 0.9 ms
        ("bfloat16", 1 << 10, False),
        ("float8_e4m3fn", 1 << 16, True),  # 64 KiB take 0.5 ms
        ("float8_e4m3fn", 1 << 10, False),
    ],
)
def test_where_two_ranks_reduce(dtype: str, elements: int, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []

    class Watched(Workers):
        def submit(self, *args: object, **options: object) -> None:
            submitted.append(args)
            super().submit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(real_engine, "Workers", Watched)

    async def main(rank: R) -> bool:
        x = np.ones(elements, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        return bool(((await rank.all_reduce(x)) == 2).all())

    assert overlap.run(main, ranks=2) == [True, True]
    assert bool(submitted) is threads


def test_the_mean_of_bytes_goes_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides in 64 bits: 7.5 ms for 1 MiB, where the sum takes 0.03."""
    submitted = []
    monkeypatch.setattr(Workers, "submit", lambda self, work, done, priority: (submitted.append(work), done(None)))

    async def main(rank: R, op: str) -> None:
        await rank.all_reduce(np.ones(1 << 18, np.int8), op)

    overlap.run(main, "sum", ranks=2)
    assert submitted == []
    overlap.run(main, "mean", ranks=2)
    assert len(submitted) == 1
