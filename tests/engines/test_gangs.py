"""Gangs without an engine: what members and drivers do is the same on all of them."""

import marshal
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.config import RunConfig
from overlap.engines import attempts, home
from overlap.engines.attempts import run_attempts
from overlap.engines.demand import ResourcesError, lacking, wait_for_resources
from overlap.engines.gang import GangOutcome, GangSpec, MemberEnd, describe_gang
from overlap.engines.member import GangMember
from overlap.engines.verdict import failure, find_lost_member
from overlap.errors import PeerLostError, RankFailedError, UsageError
from transports.failures import LinkLostError

pickling: Any = SimpleNamespace(dumps=lambda value: pickle.dumps(value), loads=pickle.loads)


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


def spec(fails: bool = False, **settings: Any) -> GangSpec:
    wanted = RunConfig.given(ranks=4, **settings)
    return describe_gang(
        "Threads",
        total_of,
        (fails,),
        wanted,
        ranks_each=2,
        argument="each",
        name="mine",
        pickling=pickling,
        import_path=(),
    )


def once(of: GangSpec) -> GangOutcome:
    """Run the members of a gang in threads."""
    store, ends = Store(), {}

    def live(member: int) -> None:
        ends[member] = GangMember(of, member, pickling).run(store)

    threads = [threading.Thread(target=live, args=(member,)) for member in range(of.members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return GangOutcome(ends=ends, lost={})


def test_results_come_in_the_order_of_ranks_with_one_trace(tmp_path: Path) -> None:
    wanted = RunConfig.given(ranks=4, trace=tmp_path / "run.json")
    got = run_attempts(spec(trace=tmp_path / "run.json"), wanted, once, max_restarts=0, loads=pickle.loads)
    assert got == [(rank, 6.0, 0) for rank in range(4)]
    from overlap.timeline import read_trace

    assert read_trace(tmp_path / "run.json").ranks() == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_gang_that_fails_starts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = RunConfig.given(ranks=4, flight_dir=str(tmp_path))
    got = run_attempts(spec(fails=True), wanted, once, max_restarts=2, loads=pickle.loads)
    assert got == [(rank, 6.0, 1) for rank in range(4)]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("overlap: restart")]
    assert len(told) == 1
    lacking = "no complete state; --state-dir or Checkpoints keep one"
    assert told[0].startswith(f"overlap: restart 1 of 2, from the beginning ({lacking}): rank 3 failed at test_gangs")
    assert len(list(tmp_path.glob("mine-attempt0-*.flight"))) == 2  # of which the last step was read, too


def test_the_error_is_that_of_the_rank_itself(tmp_path: Path) -> None:
    wanted = RunConfig.given(ranks=4, flight_dir=str(tmp_path))
    with pytest.raises(RankFailedError, match=r"rank 3 failed at test_gangs.py:\d+: ValueError: on purpose") as caught:
        run_attempts(spec(fails=True), wanted, once, max_restarts=0, loads=pickle.loads)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__notes__[0].startswith("where rank 3 ran:\nTraceback")
    assert caught.value.__notes__[1].startswith("flight records of 2 processes are in")


def test_members_of_another_version_are_refused() -> None:
    other = spec()
    object.__setattr__(other, "version", "overlap 0 on Python 2.7")
    end = GangMember(other, 0, pickling).run(Store())
    assert isinstance(end.error, UsageError)
    assert str(end.error).endswith("and the driver has overlap 0 on Python 2.7: install one version everywhere")


def test_a_member_without_a_module_of_the_program_says_so() -> None:
    def loads(_: bytes) -> object:
        raise ModuleNotFoundError("No module named 'numpy'")

    lacking: Any = SimpleNamespace(dumps=pickling.dumps, loads=loads)
    end = GangMember(spec(), 1, lacking).run(Store())
    assert isinstance(end.error, UsageError)
    assert str(end.error) == (
        "main: member 1 cannot load it: ModuleNotFoundError: No module named 'numpy'; the modules that it needs must "
        "be importable on every machine"
    )


def test_a_result_that_cannot_be_sent_is_named() -> None:
    locked = describe_gang(
        "Threads", returns_a_lock, (), RunConfig.given(ranks=1), ranks_each=1, argument="each", name=None,
        pickling=pickling, import_path=(),
    )  # fmt: skip
    end = GangMember(locked, 0, pickling).run(Store())
    assert isinstance(end.error, UsageError)
    assert str(end.error).startswith("rank 0 returned <unlocked _thread.lock")
    assert "which cannot be sent to the driver: TypeError" in str(end.error)


async def returns_a_lock(rank: overlap.Rank) -> object:
    return threading.Lock()


def test_a_member_that_is_stopped_ends_without_an_error() -> None:
    member = GangMember(describe_gang(
        "Threads", waits, (), RunConfig.given(ranks=1), ranks_each=1, argument="each", name=None, pickling=pickling,
        import_path=(),
    ), 0, pickling)  # fmt: skip
    timer = threading.Timer(0.3, member.stop)
    timer.start()
    end = member.run(Store())
    timer.join()
    assert (end.results, end.error) == (None, None)


async def waits(rank: overlap.Rank) -> None:
    import trio

    await trio.sleep_forever()


# -- verdicts --------------------------------------------------------------------------------------------------------


def lost(rank: int) -> RankFailedError:
    cause = PeerLostError("gone", culprit=rank)
    return RankFailedError(rank=rank, cause=cause, where="", doing=(), others={}, world_size=4)


def raised(rank: int) -> RankFailedError:
    return RankFailedError(rank=rank, cause=ValueError("no"), where="", doing=(), others={}, world_size=4)


def test_the_rank_that_has_raised_beats_what_others_say_of_it() -> None:
    ends = {0: MemberEnd(member=0, error=lost(3)), 1: MemberEnd(member=1, error=raised(3))}
    assert failure(spec(), GangOutcome(ends=ends, lost={})) is ends[1].error
    assert (find_lost_member(spec(), ends[0]), find_lost_member(spec(), ends[1])) == (1, None)


def test_a_broken_wire_is_how_the_loss_of_another_is_seen() -> None:
    cut = RankFailedError(rank=0, cause=LinkLostError("2 is lost"), where="", doing=(), others={}, world_size=4)
    ends = {0: MemberEnd(member=0, error=cut), 1: MemberEnd(member=1, error=lost(1))}
    assert failure(spec(), GangOutcome(ends=ends, lost={})) is ends[1].error


def test_what_cannot_be_meant_beats_all() -> None:
    ends = {0: MemberEnd(member=0, error=raised(0)), 1: MemberEnd(member=1, error=UsageError("no numpy"))}
    assert failure(spec(), GangOutcome(ends=ends, lost={})) is ends[1].error


def test_where_nobody_is_left_the_engine_is_believed() -> None:
    error = failure(spec(), GangOutcome(ends={}, lost={1: "has died", 0: "has died"}))
    assert str(error).startswith("rank 2 failed: PeerLostError: its process on Threads has died")


def test_where_the_place_to_meet_is_gone_the_engine_says_why() -> None:
    ends = {1: MemberEnd(member=1, error=PeerLostError("store: its actor has ended", culprit=-1))}
    error = failure(spec(), GangOutcome(ends=ends, lost={0: "has died"}))
    assert str(error).startswith("rank 0 failed: PeerLostError: its process on Threads has died")


def test_what_the_engine_says_is_a_note() -> None:
    error = failure(spec(), GangOutcome(ends={0: MemberEnd(member=0, error=lost(3))}, lost={1: "ran out of memory"}))
    assert error is not None
    assert error.__notes__ == ["the process of ranks 2-3 ran out of memory"]


# -- resources -------------------------------------------------------------------------------------------------------


def test_waiting_ends_with_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("overlap.engines.demand.time.monotonic", lambda: clock[0])

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
    assert lacking([{"CPU": 2}] * 3, nodes) == "2 places with CPU: 2; free: CPU 3 on a, CPU 1 on b"
    assert lacking([{"TPU": 1}], nodes) == "1 place with TPU: 1; free: nothing of that"
    assert lacking([{"CPU": 1}], nodes).startswith("a place that fits the strategy; free: ")


# -- files and programs ----------------------------------------------------------------------------------------------


def test_files_come_home_once_and_stay_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = home.make_gang_folder("token")
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("a-12.flight", "b-13.flight", "trace-process1.json.part", "other"):
        (folder / name).write_bytes(name.encode())
    assert home.take_records("token", pid=12) == {"a-12.flight": b"a-12.flight"}
    assert set(home.take_records("token")) == {"b-13.flight", "trace-process1.json.part"}
    assert home.take_records("token") == {}
    assert not folder.exists()
    (tmp_path / "x.flight").symlink_to(folder / "gone")
    written = home.write_files({"../x.flight": b"x"}, tmp_path)
    assert written == [tmp_path / "x.flight"]
    assert written[0].read_bytes() == b"x"
    assert not written[0].is_symlink()


def test_folders_that_were_left_long_ago_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, living, young = (home.make_gang_folder(token) for token in ("old", "living", "young"))
    (living / f"job-{os.getpid()}.flight").touch()
    for folder in (old, living):
        os.utime(folder, (1, 1))
    new = home.make_gang_folder("new")
    assert sorted(tmp_path.iterdir()) == sorted([living, young, new])


def test_code_keeps_the_name_of_its_file() -> None:
    cloudpickle = pytest.importorskip("cloudpickle", reason="not installed: cloudpickle")
    from overlap.engines.pickling import Pickling

    packs = Pickling(cloudpickle)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def f(x):\n    def g():\n        return x\n    return g", "/home/me/train.py", "exec"), space)
    got: Any = packs.loads(packs.dumps(space["f"]))
    assert (got(3)(), got.__code__.co_filename, got(3).__code__.co_filename) == (3, *["/home/me/train.py"] * 2)
    assert marshal.loads(marshal.dumps(got.__code__)) == got.__code__


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"ranks_each": 0}, "each: expected a positive integer, got 0"),
        ({"ranks_each": 3}, "ranks: 4 cannot be divided into each=3"),
        ({"name": "x" * 60}, "name: expected 1 to 27 printable characters"),
        ({"config": RunConfig()}, "ranks: expected their number, which Threads cannot know; pass ranks=N"),
        ({"config": RunConfig.given(ranks=4, virtual=overlap.Virtual())}, "clock: Threads runs ranks in real time"),
        ({"args": (1, threading.Lock())}, "argument 2 of main: cannot be sent to other processes: TypeError"),
        ({"main": lambda rank: None}, "main: cannot be sent to other processes"),
    ],
)
def test_bad_input_is_a_sentence(changed: dict[str, Any], sentence: str) -> None:
    told: dict[str, Any] = {
        "engine": "Threads", "main": total_of, "args": (), "config": RunConfig.given(ranks=4), "ranks_each": 2,
        "argument": "each", "name": None, "pickling": pickling, "import_path": (),
    } | changed  # fmt: skip
    with pytest.raises(UsageError, match=sentence):
        describe_gang(told.pop("engine"), told.pop("main"), told.pop("args"), told.pop("config"), **told)


def test_restarts_are_no_negative_number() -> None:
    with pytest.raises(UsageError, match="max_restarts: expected 0 or more, got -1"):
        run_attempts(spec(), RunConfig(), once, max_restarts=-1, loads=pickle.loads)
    assert attempts.summary_line(raised(1)) == "rank 1 failed: ValueError: no; the other 3 ranks were stopped"
