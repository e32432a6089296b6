"""What ranks save together: the newest complete state, the same for all, whenever they were killed."""

import os
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import RankFailedError, UsageError
from overlap.state.parts import Parts, Save


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def in_world(main, *args: object, ranks: int = 2, **settings: object) -> list:
    try:
        return overlap.run(main, *args, ranks=ranks, **settings)
    except RankFailedError as failed:
        raise failed.cause from None


async def saves(rank, steps, extra=0):
    await rank.state.latest()
    for step in steps:
        await rank.state.save(step, {"weights": np.full(3, 10 * step + rank.rank + extra), "step": step})


async def latest(rank):
    state = await rank.state.latest()
    return None if state is None else (state.step, state.world_size, state.tree["weights"].tolist())


def folders(folder):
    return sorted(path.name[:17] for path in folder.iterdir())


def test_each_rank_gets_back_what_it_saved(folder):
    in_world(saves, [1, 4])
    assert in_world(latest) == [(4, 2, [40, 40, 40]), (4, 2, [41, 41, 41])]
    assert not list(folder.glob("**/*.writing*"))


def test_there_is_none_at_first(folder):
    assert in_world(latest) == [None, None]
    assert not folder.exists()


def test_the_two_newest_are_kept(folder):
    in_world(saves, range(5))
    assert folders(folder) == ["step-000000000003", "step-000000000004"]


def test_a_save_that_lacks_a_part_does_not_count(folder):
    in_world(saves, [1, 2])
    (newest,) = folder.glob("step-000000000002-*")
    (newest / "part-1-of-2.state").unlink()
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]


def test_parts_of_two_attempts_are_never_mixed(folder):
    """An attempt that dies within a save leaves a part; the next one, dying there too, leaves the other part."""
    in_world(saves, [1])
    for rank in (0, 1):
        Parts(folder).write(Save(2, 1000 + rank), rank, 2, [b"of another attempt"])
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]


def listen(name):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


@pytest.mark.parametrize("place", ["part", "folder"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "link to nothing", "link to itself"])
def test_a_name_that_is_no_file_is_passed_over(folder, kind, place, monkeypatch):
    in_world(saves, [1, 2])
    (newest,) = folder.glob("step-000000000002-*")
    path = newest / "part-1-of-2.state"
    if place == "folder":
        shutil.rmtree(newest)
        path = newest
    else:
        path.unlink()
    monkeypatch.chdir(path.parent)  # the name of a socket has at most 107 bytes
    make = {
        "pipe": os.mkfifo,
        "socket": listen,
        "device": lambda name: os.symlink("/dev/zero", name),
        "folder": os.mkdir,
        "link to nothing": lambda name: os.symlink("nothing", name),
        "link to itself": lambda name: os.symlink(name, name),
    }
    make[kind](path.name)
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]
    in_world(saves, [3, 4])
    assert in_world(latest) == [(4, 2, [40, 40, 40]), (4, 2, [41, 41, 41])]


def test_what_a_killed_attempt_has_left_is_removed_by_the_next_save(folder):
    in_world(saves, [1])
    Parts(folder).write(Save(2, 1000), 0, 2, [b"unfinished"])
    in_world(saves, [2, 3])
    assert folders(folder) == ["step-000000000002", "step-000000000003"]
    assert {save.nonce for save, _ in Parts(folder).complete_saves()} != {1000}


def test_a_damaged_part_is_passed_over(folder, capsys):
    in_world(saves, [1, 2])
    (newest,) = folder.glob("step-000000000002-*")
    part = newest / "part-1-of-2.state"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]
    told = "overlap: state: step 2 is passed over: the part of rank 1 cannot be read: its checksum is wrong\n"
    assert capsys.readouterr().err == told


def test_ranks_need_not_see_the_parts_of_others(folder, tmp_path):
    """As where each machine has a folder of its own: both are in one process here, and look at two of them."""
    in_world(saves, [1, 2])
    for rank in (0, 1):
        shutil.copytree(folder, tmp_path / f"of {rank}")
        for part in (tmp_path / f"of {rank}").glob(f"*/part-{1 - rank}-*"):
            part.unlink()

    async def look(rank):
        rank._state_dir = str(tmp_path / f"of {rank.rank}")
        return await latest(rank)

    assert in_world(look) == [(2, 2, [20, 20, 20]), (2, 2, [21, 21, 21])]


def test_a_world_of_another_size_chooses_whose_part_it_wants(folder):
    in_world(saves, [3])

    async def resized(rank):
        state = await rank.state.latest()
        with pytest.raises(UsageError) as caught:
            _ = state.tree
        with pytest.raises(UsageError) as beyond:
            await state.part(2)
        parts = [(await state.part(old))["weights"][0] for old in range(state.world_size)]
        await rank.state.save(4, {"weights": np.full(3, rank.rank)})
        return str(caught.value), str(beyond.value), parts

    told, beyond, parts = in_world(resized, ranks=3)[2]
    assert told == (
        "state: step 3 was saved by 2 ranks, and the world has another size now; choose a part: await state.part(rank)"
    )
    assert beyond == "rank: expected 0 to 1, a rank that saved the state, got 2"
    assert parts == [30, 31]
    assert [each[:2] for each in in_world(latest, ranks=3)] == [(4, 3)] * 3


def test_a_state_says_what_it_is(folder):
    in_world(saves, [3])

    async def described(rank):
        return repr(await rank.state.latest())

    assert in_world(described)[0] == "<SavedState of step 3, 2 ranks>"


# -- what cannot be meant ------------------------------------------------------------------------------------------


def refusal(main, *args: object) -> str:
    with pytest.raises(UsageError) as caught:
        in_world(main, *args, ranks=1)
    return str(caught.value)


def test_without_a_folder_nothing_is_saved(monkeypatch):
    monkeypatch.delenv("OVERLAP_STATE_DIR", raising=False)
    assert in_world(latest) == [None, None]
    assert refusal(saves, [1]) == (
        "state: there is no folder for it; give --state-dir DIR, or overlap.run(..., state_dir=DIR)"
    )


def test_a_rank_without_a_folder_has_no_state_for_the_others(folder):
    in_world(saves, [1])

    async def main(rank):
        if rank.rank == 1:
            rank._state_dir = None
        return await rank.state.latest()

    assert in_world(main) == [None, None]


@pytest.mark.parametrize("kind", [str, Path])
def test_the_program_names_the_folder(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("OVERLAP_STATE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    in_world(saves, [2], state_dir=kind("state"))
    assert folders(tmp_path / "state") == ["step-000000000002"]
    assert in_world(latest, state_dir=kind("state")) == [(2, 2, [20, 20, 20]), (2, 2, [21, 21, 21])]
    assert in_world(latest, state_dir=kind("another")) == [None, None]


@pytest.mark.parametrize("clock", ["real", "virtual", overlap.Virtual(shapes_only=True, alike=1)])
def test_the_rank_names_the_folder(clock, tmp_path):
    async def main(rank):
        return rank.state.folder

    assert in_world(main, clock=clock, state_dir=tmp_path) == [str(tmp_path)] * 2


def test_a_folder_is_a_path():
    with pytest.raises(UsageError) as caught:
        overlap.run(latest, state_dir=5)
    assert str(caught.value) == "state_dir: expected a path, got 5"


@pytest.mark.parametrize("step", [-1, True, 1.5, "1"])
def test_a_step_is_a_number(folder, step):
    async def main(rank):
        await rank.state.save(step, {})

    assert refusal(main) == f"step: expected 0 or more, got {step!r}"


def test_steps_go_forward(folder):
    assert refusal(saves, [3, 3]) == "step: expected more than the last saved step (3), got 3"


def test_the_state_of_another_run_is_not_written_over(folder):
    in_world(saves, [7])

    async def begins_anew(rank):
        await rank.state.save(1, {})

    assert refusal(begins_anew) == (
        f"state: {folder} holds step 7 of another run; go on from it with rank.state.latest(), or name another folder"
    )


def test_a_file_in_the_place_of_the_folder_is_refused(folder):
    folder.touch()
    assert (
        refusal(saves, [1])
        == f"state_dir: {folder} is no folder; make it, or name another (state_dir: OVERLAP_STATE_DIR)"
    )


_FULL = (
    r"^state of step 1 cannot be written: \[Errno 28\] No space left on device: '.*state.*/part-[01]-of-2.state'; "
    "make room there, or name another --state-dir$"
)


def test_a_disk_that_cannot_be_written_fails_the_rank(folder, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=_FULL) as caught:
        in_world(saves, [1])
    assert not [path for path in folder.rglob("*") if path.is_file()], caught.value


def test_virtual_time_keeps_nothing(folder):
    async def main(rank):
        assert await rank.state.latest() is None
        await rank.state.save(1, {})

    in_world(main, clock="virtual")
    assert not folder.exists()


@pytest.mark.parametrize("act", ["save", "latest"])
@pytest.mark.parametrize("clock", ["real", overlap.Virtual()])
def test_a_rank_that_comes_alone_is_told_with_its_line(folder, monkeypatch, act, clock):
    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    monkeypatch.setenv("OVERLAP_GIVE_UP_S", "0.4")

    async def alone(rank):
        if rank.rank == 0:
            await (rank.state.save(1, {}) if act == "save" else rank.state.latest())

    line = alone.__code__.co_firstlineno + 2
    name = "state.latest" if act == "latest" else "state.save begins" if clock == "real" else "state.save"
    with pytest.raises(overlap.OverlapError) as stall:
        overlap.run(alone, ranks=2, clock=clock, timeout_s=60)
    assert re.search(rf"{name} #0 on group 'world' \([\w/]*test_store.py:{line}\)", str(stall.value))
    assert "(store.py" not in str(stall.value)
