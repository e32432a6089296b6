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
from overlap.state.files import FileFacts, write_file
from overlap.state.saves import STATES, Save, Saves
from tests.errors import error_from, error_of


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


def leave(folder, save, rank, ranks=2):
    """Leave the file of one rank, as an attempt does that dies within a save."""
    path = Saves(folder, STATES).folder_of(save) / f"rank-{rank}-of-{ranks}.safetensors"
    write_file(path, {}, FileFacts(step=save.step, nonce=save.nonce, rank=rank, ranks=ranks))


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
    (newest / "rank-1-of-2.safetensors").unlink()
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]


def test_parts_of_two_attempts_are_never_mixed(folder):
    """An attempt that dies within a save leaves a part; the next one, dying there too, leaves the other part."""
    in_world(saves, [1])
    for rank in (0, 1):
        leave(folder, Save(2, 1000 + rank), rank)
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]


def listen(name):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


@pytest.mark.parametrize("place", ["part", "folder"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "link to nothing", "link to itself"])
def test_a_name_that_is_no_file_is_passed_over(folder, kind, place, monkeypatch):
    in_world(saves, [1, 2])
    (newest,) = folder.glob("step-000000000002-*")
    path = newest / "rank-1-of-2.safetensors"
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
    leave(folder, Save(2, 1000), 0)
    in_world(saves, [2, 3])
    assert folders(folder) == ["step-000000000002", "step-000000000003"]
    assert {save.nonce for save in Saves(folder, STATES).list_complete()} != {1000}


def test_a_damaged_part_is_passed_over(folder, capsys):
    in_world(saves, [1, 2])
    (newest,) = folder.glob("step-000000000002-*")
    part = newest / "rank-1-of-2.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert in_world(latest) == [(1, 2, [10, 10, 10]), (1, 2, [11, 11, 11])]
    assert capsys.readouterr().err == (
        f"overlap: state of step 2 is passed over: {part} is damaged: its bytes do not match its digest; "
        "restore the file, or delete this save\n"
    )


def test_ranks_need_not_see_the_parts_of_others(folder, tmp_path):
    """As where each machine has a folder of its own: both are in one process here, and look at two of them."""
    in_world(saves, [1, 2])
    for rank in (0, 1):
        shutil.copytree(folder, tmp_path / f"of {rank}")
        for part in (tmp_path / f"of {rank}").glob(f"*/rank-{1 - rank}-*"):
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
        error = await error_from(UsageError, state.part(2))
        parts = [(await state.part(old))["weights"][0] for old in range(state.world_size)]
        await rank.state.save(4, {"weights": np.full(3, rank.rank)})
        return str(caught.value), str(error), parts

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
    return str(error_of(UsageError, in_world, main, *args, ranks=1))


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
    assert str(error_of(UsageError, overlap.run, latest, state_dir=5)) == "state_dir: expected a path, got 5"


@pytest.mark.parametrize("step", [-1, True, 1.5, "1"])
def test_a_step_is_a_number(folder, step):
    async def main(rank):
        await rank.state.save(step, {})

    assert refusal(main) == f"step: expected an integer of 0 or more, got {step!r}"


def test_steps_go_forward(folder):
    assert refusal(saves, [3, 3]) == "step: expected more than the last saved step (3), got 3"


def test_the_state_of_another_run_is_not_written_over(folder):
    in_world(saves, [7])

    async def begins_anew(rank):
        await rank.state.save(1, {})

    assert refusal(begins_anew) == (
        f"state: {next(folder.iterdir())} is of another run; go on from it with rank.state.latest(), or name another "
        "folder"
    )


def test_a_file_in_the_place_of_the_folder_is_refused(folder):
    folder.touch()
    assert (
        refusal(saves, [1])
        == f"state_dir: {folder} is no folder; make it, or name another (state_dir: OVERLAP_STATE_DIR)"
    )


def test_two_jobs_with_one_folder_are_told_and_lose_nothing(folder):
    in_world(saves, [1])

    async def with_another(rank):
        await rank.state.latest()
        await rank.state.save(2, {})
        if rank.rank == 0:
            leave(folder, Save(9, 1000), 0, ranks=1)
        await rank.barrier()
        await rank.state.save(3, {})

    error = error_of(UsageError, in_world, with_another)
    assert str(error) == (f"state: another job saves in {folder}, too, its step 9; name a folder for each job")
    assert [step for step, _ in Saves(folder, STATES).list_complete()] == [9, 2, 1]


def test_two_worlds_that_saved_half_of_a_step_each_are_told(folder, capsys):
    in_world(saves, [1], ranks=4)
    for rank in range(4):
        leave(folder, Save(2, 1000 + rank // 2), rank, ranks=4)
    assert [step for step, *_ in in_world(latest, ranks=4)] == [1] * 4
    assert capsys.readouterr().err.splitlines() == [
        f"overlap: state of step 2 is passed over: it was cut short, or files were removed: {path} lacks {lacked}; put "
        "them back if you can"
        for path, lacked in [
            (Saves(folder, STATES).folder_of(Save(2, 1001)), "rank-0-of-4.safetensors, rank-1-of-4.safetensors"),
            (Saves(folder, STATES).folder_of(Save(2, 1000)), "rank-2-of-4.safetensors, rank-3-of-4.safetensors"),
        ]
    ]


def test_a_file_of_another_save_is_passed_over(folder, capsys):
    in_world(saves, [1, 2])
    (newest,) = folder.glob("step-000000000002-*")
    shutil.copy(newest / "rank-0-of-2.safetensors", newest / "rank-1-of-2.safetensors")
    assert in_world(latest)[0][0] == 1
    assert "rank-1-of-2.safetensors is a file of another save" in capsys.readouterr().err


@pytest.mark.parametrize("act", ["save", "latest"])
def test_a_state_of_the_version_before_is_refused_by_name(folder, act):
    path = folder / "step-000000000007-0123456789abcdef"
    path.mkdir(parents=True)
    (path / "part-0-of-1.state").touch()

    async def main(rank):
        await (rank.state.latest() if act == "latest" else rank.state.save(8, {}))

    assert refusal(main) == (
        f"state: {path} is of an earlier version of overlap, which this one cannot read; go on with that version, or "
        "name another folder"
        if act == "latest"
        else f"state: {path} is of another run; go on from it with rank.state.latest(), or name another folder"
    )


def test_where_all_are_damaged_nobody_begins_anew(folder):
    in_world(saves, [1])
    (part,) = folder.glob("*/rank-0-of-2.safetensors")
    part.write_bytes(b"")
    error = error_of(UsageError, in_world, latest)
    assert str(error).startswith(f"state: none of the 1 in {folder} can be read (")
    assert str(error).endswith("); name another folder")


_FULL = (
    r"^state of step 1 cannot be written: \[Errno 28\] No space left on device: '.*state.*/rank-[01]-of-2.safetensors'"
    "; make room there, or name another folder$"
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
    error = error_of(overlap.OverlapError, overlap.run, alone, ranks=2, clock=clock, timeout_s=60)
    assert re.search(rf"{name}(: size)? #0 on group 'world' \([\w/]*test_store.py:{line}\)", str(error))
    assert "(store.py" not in str(error)
