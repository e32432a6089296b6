"""Jobs on Ray without a cluster: members as threads, verdicts, resources, files."""

import asyncio
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.config import RunConfig
from overlap.errors import PeerLostError, RankFailedError, UsageError
from transports.failures import LinkLostError

pytest.importorskip("ray", reason="not installed: ray")
pytestmark = pytest.mark.engines

from overlap.ray import ResourcesError, restarts  # noqa: E402
from overlap.ray import job as jobs  # noqa: E402
from overlap.ray.job import JobSpec, MemberEnd, Outcome, make_job_spec  # noqa: E402
from overlap.ray.member import MemberActor  # noqa: E402
from overlap.ray.placement import describe_missing_resources, wait_for_resources  # noqa: E402
from overlap.ray.restarts import blamed_members, find_first_failure, run_attempts  # noqa: E402
from tests.threads import run_threads  # noqa: E402


class Store(dict[str, bytes]):
    """A store inside this process."""

    def __init__(self) -> None:
        self._there = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._there:
            self[key] = value
            self._there.notify_all()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        with self._there:
            self._there.wait_for(lambda: key in self, 60)
            return self[key]


async def total_of(rank: overlap.Rank, fails: bool) -> tuple[int, float, int]:
    with rank.step(4):
        total = await rank.all_reduce(np.full(2, rank.rank))
    if fails and rank.rank == 3 and rank.restart == 0:
        raise ValueError("on purpose")
    await rank.barrier()
    return rank.rank, float(total[0]), rank.restart


def spec(fails: bool = False, **settings: Any) -> JobSpec:
    return make_job_spec(total_of, (fails,), RunConfig.from_values(ranks=4, **settings), ranks_each=2, name="mine")


def end_of(job: JobSpec, member: int, store: Store) -> MemberEnd:
    return asyncio.run(MemberActor(job, member).run(store))


def once(of: JobSpec) -> Outcome:
    """Run the members of a gang in threads."""
    store, ends = Store(), {}

    def live(member: int) -> None:
        ends[member] = end_of(of, member, store)

    run_threads(threading.Thread(target=live, args=(member,)) for member in range(of.members))
    return Outcome(ends=ends, lost={})


def test_results_come_in_the_order_of_ranks_with_one_trace(tmp_path: Path) -> None:
    got = run_attempts(spec(trace=tmp_path / "run.json"), once, max_restarts=0)
    assert got == [(rank, 6.0, 0) for rank in range(4)]
    from overlap.timeline import read_trace

    assert read_trace(tmp_path / "run.json").ranks() == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_gang_that_fails_starts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = run_attempts(spec(fails=True, flight_dir=str(tmp_path)), once, max_restarts=2)
    assert got == [(rank, 6.0, 1) for rank in range(4)]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("overlap: restart")]
    assert len(told) == 1
    lacking = "no complete state; --state-dir or Checkpoints keep one"
    assert told[0].startswith(f"overlap: restart 1 of 2, from the beginning ({lacking}): rank 3 failed at test_jobs")
    assert len(list(tmp_path.glob("mine-attempt0-*.flight"))) == 2  # of which the last step was read, too


def test_the_error_is_that_of_the_rank_itself(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 3 failed at test_jobs.py:\d+: ValueError: on purpose") as caught:
        run_attempts(spec(fails=True, flight_dir=str(tmp_path)), once, max_restarts=0)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__notes__[0].startswith("where rank 3 ran:\nTraceback")
    assert caught.value.__notes__[1].startswith("flight records of 2 processes are in")


def test_members_of_another_version_are_refused() -> None:
    other = spec()
    object.__setattr__(other, "version", "overlap 0 on Python 2.7")
    end = end_of(other, 0, Store())
    assert isinstance(end.error, UsageError)
    assert str(end.error).endswith("and the driver has overlap 0 on Python 2.7: install one version everywhere")


def loads_nothing() -> object:
    raise ModuleNotFoundError("No module named 'numpy'")


class Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return loads_nothing, ()


def test_a_member_without_a_module_of_the_program_says_so() -> None:
    lacking = make_job_spec(total_of, (Unloadable(),), RunConfig.from_values(ranks=4), ranks_each=2, name=None)
    end = end_of(lacking, 1, Store())
    assert isinstance(end.error, UsageError)
    assert str(end.error) == (
        f"main: the actor of ranks 2-3 on node {os.uname().nodename} cannot load it: ModuleNotFoundError: No module "
        "named 'numpy'; the modules that it needs must be importable on every machine"
    )


def test_a_result_that_cannot_be_sent_is_named() -> None:
    locked = make_job_spec(returns_a_lock, (), RunConfig.from_values(ranks=1), ranks_each=1, name=None)
    end = end_of(locked, 0, Store())
    assert isinstance(end.error, UsageError)
    assert str(end.error).startswith("rank 0 returned <unlocked _thread.lock")
    assert "which cannot be sent to the driver: TypeError" in str(end.error)


async def returns_a_lock(rank: overlap.Rank) -> object:
    return threading.Lock()


def test_a_member_that_is_stopped_ends_without_an_error() -> None:
    async def stopped() -> MemberEnd:
        member = MemberActor(make_job_spec(waits, (), RunConfig.from_values(ranks=1), ranks_each=1, name=None), 0)
        running = asyncio.create_task(member.run(Store()))
        await asyncio.to_thread(_waiting.wait, 60)
        await member.stop()
        return await running

    end = asyncio.run(stopped())
    assert (end.results, end.error) == (None, None)


_waiting = threading.Event()


async def waits(rank: overlap.Rank) -> None:
    import trio

    _waiting.set()
    await trio.sleep_forever()


# -- verdicts --------------------------------------------------------------------------------------------------------


def lost(rank: int) -> RankFailedError:
    cause = PeerLostError("gone", culprit=rank)
    return RankFailedError(rank=rank, cause=cause, where="", doing=(), others={}, world_size=4)


def raised(rank: int) -> RankFailedError:
    return RankFailedError(rank=rank, cause=ValueError("no"), where="", doing=(), others={}, world_size=4)


def test_the_rank_that_has_raised_beats_what_others_say_of_it() -> None:
    ends = {0: MemberEnd(error=lost(3)), 1: MemberEnd(error=raised(3))}
    assert find_first_failure(spec(), Outcome(ends=ends, lost={})) is ends[1].error
    assert (blamed_members(spec(), {0: ends[0]}), blamed_members(spec(), {1: ends[1]})) == ({1}, set())


def test_a_broken_wire_is_how_the_loss_of_another_is_seen() -> None:
    cut = RankFailedError(rank=0, cause=LinkLostError("2 is lost"), where="", doing=(), others={}, world_size=4)
    ends = {0: MemberEnd(error=cut), 1: MemberEnd(error=lost(1))}
    assert find_first_failure(spec(), Outcome(ends=ends, lost={})) is ends[1].error


def test_what_cannot_be_meant_beats_all() -> None:
    ends = {0: MemberEnd(error=raised(0)), 1: MemberEnd(error=UsageError("no numpy"))}
    assert find_first_failure(spec(), Outcome(ends=ends, lost={})) is ends[1].error


def test_where_nobody_is_left_the_engine_is_believed() -> None:
    error = find_first_failure(spec(), Outcome(ends={}, lost={1: "has died", 0: "has died"}))
    assert str(error).startswith("rank 2 failed: PeerLostError: its process on Ray has died")


def test_where_the_place_to_meet_is_gone_the_engine_says_why() -> None:
    ends = {1: MemberEnd(error=PeerLostError("store: its actor has ended", culprit=-1))}
    error = find_first_failure(spec(), Outcome(ends=ends, lost={0: "has died"}))
    assert str(error).startswith("rank 0 failed: PeerLostError: its process on Ray has died")


def test_what_the_engine_says_is_a_note() -> None:
    error = find_first_failure(spec(), Outcome(ends={0: MemberEnd(error=lost(3))}, lost={1: "ran out of memory"}))
    assert error is not None
    assert error.__notes__ == ["the process of ranks 2-3 ran out of memory"]


# -- resources -------------------------------------------------------------------------------------------------------


def test_waiting_ends_with_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("overlap.ray.placement.time.monotonic", lambda: clock[0])

    def ready(seconds: float) -> bool:
        clock[0] += seconds
        return False

    with pytest.raises(ResourcesError, match="job 'a': not there within 40 s: a node") as caught:
        wait_for_resources("job 'a'", 40, ready, lambda: "a node")
    assert (caught.value.missing, caught.value.waited_s) == ("a node", 40)
    assert capsys.readouterr().err == "overlap: job 'a': waiting for resources, up to 40 s: a node\n" * 2


def test_what_is_there_at_once_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    wait_for_resources("job 'a'", 40, lambda seconds: True, lambda: "a node")
    assert capsys.readouterr().err == ""


def test_what_has_no_place_is_named() -> None:
    nodes = {"a": {"CPU": 3.0}, "b": {"CPU": 1.0, "GPU": 1.0}}
    assert describe_missing_resources({"CPU": 2}, 3, nodes) == "2 places with CPU: 2; free: CPU 3 on a, CPU 1 on b"
    assert describe_missing_resources({"TPU": 1}, 1, nodes) == "1 place with TPU: 1; free: nothing of that"
    assert describe_missing_resources({"CPU": 1}, 1, nodes).startswith("a place that fits the strategy; free: ")


# -- files and programs ----------------------------------------------------------------------------------------------


def test_files_come_home_once_and_stay_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = jobs.make_job_folder("token")
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("a-12.flight", "b-13.flight", "trace-process1.json.part", "other"):
        (folder / name).write_bytes(name.encode())
    assert jobs.take_job_files("token", pid=12) == {"a-12.flight": b"a-12.flight"}
    assert set(jobs.take_job_files("token")) == {"b-13.flight", "trace-process1.json.part"}
    assert jobs.take_job_files("token") == {}
    assert not folder.exists()
    (tmp_path / "x.flight").symlink_to(folder / "gone")
    outcome = Outcome(ends={}, lost={}, files={"../x.flight": b"x", "x.part": b""})
    written = restarts._write_records(outcome, tmp_path)
    assert written == [tmp_path / "x.flight"]
    assert written[0].read_bytes() == b"x"
    assert not written[0].is_symlink()


def test_folders_that_were_left_long_ago_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, living, young = (jobs.make_job_folder(token) for token in ("old", "living", "young"))
    (living / f"job-{os.getpid()}.flight").touch()
    for folder in (old, living):
        os.utime(folder, (1, 1))
    new = jobs.make_job_folder("new")
    assert sorted(tmp_path.iterdir()) == sorted([living, young, new])


def test_code_keeps_the_name_of_its_file() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f(x):\n    def g():\n        return x\n    return g", "/home/me/train.py", "exec"), space)
    got: Any = pickle.loads(jobs.pickle_value(space["f"], ""))
    assert (got(3)(), got.__code__.co_filename, got(3).__code__.co_filename) == (3, *["/home/me/train.py"] * 2)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"ranks_each": 0}, "ranks_per_actor: expected a positive integer, got 0"),
        ({"ranks_each": 3}, "ranks: 4 cannot be divided into ranks_per_actor=3"),
        ({"name": "x" * 60}, "name: expected 1 to 27 printable characters"),
        ({"config": RunConfig()}, "ranks: expected their number, which Ray cannot know; pass ranks=N"),
        ({"config": RunConfig.from_values(ranks=4, virtual=overlap.Virtual())}, "clock: Ray runs ranks in real time"),
        ({"args": (1, threading.Lock())}, "argument 2 of main: cannot be sent to other processes: TypeError"),
        ({"main": threading.Lock()}, "main: cannot be sent to other processes"),
    ],
)
def test_bad_input_is_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    told: dict[str, Any] = {
        "main": total_of, "args": (), "config": RunConfig.from_values(ranks=4), "ranks_each": 2, "name": None,
    } | changed  # fmt: skip
    with pytest.raises(UsageError, match=sentence):
        make_job_spec(told.pop("main"), told.pop("args"), told.pop("config"), **told)


def test_restarts_are_no_negative_number() -> None:
    with pytest.raises(UsageError, match="max_restarts: expected an integer of 0 or more, got -1"):
        run_attempts(spec(), once, max_restarts=-1)
