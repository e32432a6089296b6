"""`overlap top` on worlds that run: here, inside of them."""

import json
import os
import re
import threading

import numpy as np
import pytest

import overlap
from overlap.cli import main
from overlap.errors import UsageError
from overlap.live.worlds import find_world, running


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "records"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path / "records"


def while_it_runs(look):
    """Return what a look at a world gives that has done a step of two operations."""
    found = []

    async def program(rank):
        with rank.step(3):
            total = rank.all_reduce(rank.compute(np.ones, 1024, np.float32, name="make"))
            await total
        await rank.barrier()
        if rank.rank == 0:
            found.append(look())
        await rank.barrier()

    overlap.run(program, ranks=2)
    return found[0]


def test_top_lists_the_worlds_that_run(capsys):
    (told,) = while_it_runs(lambda: json.loads(said(capsys, "top", "--json")))
    assert (told["ranks"], told["processes"], told["here"], told["step"]) == (2, 1, 1, 3)
    assert told["pids"] == [os.getpid()]
    text = while_it_runs(lambda: said(capsys, "top"))
    assert text.split("\n")[0].split()[:2] == ["job", "program"]
    assert str(os.getpid()) in text
    assert said(capsys, "top") == "no world of yours runs on this host\n"


def said(capsys, *words):
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_top_finds_worlds_whose_records_lie_elsewhere(capsys, monkeypatch, tmp_path):
    def look():
        with monkeypatch.context() as patched:
            patched.delenv("OVERLAP_FLIGHT_DIR")
            return json.loads(said(capsys, "top", "--json"))

    (told,) = while_it_runs(look)
    assert told["pids"] == [os.getpid()]
    assert look() == []
    assert list(tmp_path.rglob("*.flight")) == []


def test_top_shows_what_has_just_been_done(capsys):
    text = while_it_runs(lambda: said(capsys, "top", "--once", str(os.getpid())))
    head, sums, *_ = text.splitlines()
    assert ": 2 ranks in 1 process, " in head
    assert sums.startswith("step 3: ")
    assert "in process" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text


def test_calls_of_a_record_have_their_bytes():
    def look():
        world = find_world(None)
        for each in world.processes:
            each.ranks()
        calls = {words.kind: words.nbytes for each in world.processes for words in each.calls.values()}
        world.close()
        return calls

    calls = while_it_runs(look)
    assert (calls["compute"], calls["all_reduce"]) == (0, 4096)


def test_who_is_no_job_is_told_in_one_line():
    with pytest.raises(UsageError) as caught:
        find_world(None)
    assert str(caught.value) == "no world of yours runs on this host; start one with `overlap run`"
    with pytest.raises(UsageError) as caught:
        find_world("x")
    assert str(caught.value) == "'x' is no running job, nor the program or a process of one; running on this host: none"


def test_the_place_of_a_job_elsewhere_is_refused_with_what_shows_it(capsys):
    assert main(["top", "node1:29500"]) == 2
    assert "the ranks of a job are seen on the host where they run: ssh node1 overlap top" in capsys.readouterr().err


def test_the_list_has_names_that_can_be_copied(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["a_long_path/" * 20 + "with_a_long_name_" * 3 + "train.py"])
    text = while_it_runs(lambda: said(capsys, "top"))
    job = while_it_runs(lambda: json.loads(said(capsys, "top", "--json"))[0]["job"])
    assert len(text.splitlines()[1].split()[0]) == len(job)
    assert all(len(line) <= 80 for line in text.splitlines())
    title = while_it_runs(lambda: said(capsys, "top", "--once", str(os.getpid()))).splitlines()[0]
    assert title.startswith("..")
    assert len(title.rpartition("; job ")[2]) == len(job)


@pytest.mark.parametrize("name", ["train.py", "./train.py", "there/train.py", "{folder}/there/train.py"])
def test_a_job_is_found_by_its_program(capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["there/train.py"])
    text = while_it_runs(lambda: said(capsys, "top", "--once", name.format(folder=tmp_path)))
    assert text.startswith("train.py: 2 ranks in 1 process, ")


def test_jobs_of_one_program_are_listed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])

    def refused():
        with pytest.raises(UsageError) as caught:
            find_world("train.py")
        return str(caught.value)

    def jobs():
        worlds = running()
        for world in worlds:
            world.close()
        return [world.job for world in worlds]

    first, second = while_it_runs(lambda: while_it_runs_too(lambda: jobs()))
    assert first != second
    message = while_it_runs(lambda: while_it_runs_too(refused))
    told = r"'train\.py' is the program of several running jobs, name one of them: "
    assert re.fullmatch(told + r"[\w-]+ \(2 ranks, for \d+ s\), [\w-]+ \(2 ranks, for \d+ s\)", message)


def while_it_runs_too(look):
    """Return what a look gives while a second world runs, in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(while_it_runs(look)))
    thread.start()
    thread.join()
    return found[0]


def test_how_often_to_look_has_bounds(capsys):
    assert main(["top", "--every", "0"]) == 2
    assert "--every: 0 s; expected 0.1 to 3600" in capsys.readouterr().err


def test_what_is_no_record_is_overlooked(folder):
    (folder / "x.flight").write_bytes(b"no")
    (folder / "y.flight").write_bytes(b"")
    os.mkfifo(folder / "z.flight")
    assert running() == []
