"""`overlap top` on worlds that run: here, inside of them, and on a terminal."""

import os
import re
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap.cli import main, top
from overlap.cli.top import Looks, draw_window, find_running_worlds, find_world
from overlap.errors import UsageError
from tests.errors import error_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "records"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["train.py"])  # that of `python -m pytest` takes several lines of a list
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


def listed(capsys):
    """Return the cells of the jobs that `overlap top` lists."""
    return [line.split() for line in said(capsys, "top").splitlines()[1:]]


def test_top_lists_the_worlds_that_run(capsys):
    text = while_it_runs(lambda: said(capsys, "top"))
    heads, row = text.splitlines()
    assert heads.split()[:2] == ["job", "program"]
    assert row.split()[2:5] + row.split()[-1:] == ["2", "1", "3", str(os.getpid())]  # ranks, processes, step
    assert said(capsys, "top") == "no world of yours runs on this host\n"


def said(capsys, *words):
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_top_finds_worlds_whose_records_lie_elsewhere(capsys, monkeypatch, tmp_path):
    def look():
        with monkeypatch.context() as patched:
            patched.delenv("OVERLAP_FLIGHT_DIR")
            return listed(capsys)

    (cells,) = while_it_runs(look)
    assert cells[-1] == str(os.getpid())
    assert look() == []
    assert list(tmp_path.rglob("*.flight")) == []


def test_top_shows_what_has_just_been_done(capsys):
    text = while_it_runs(lambda: said(capsys, "top", "--once", str(os.getpid())))
    head, sums, *_ = text.splitlines()
    assert ": 2 ranks in 1 process, " in head
    assert sums.startswith("step 3: ")
    heads = next(line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].startswith("rank/"))
    assert heads[-3:] == ["step", "flight", "at"]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text


def test_calls_of_a_record_have_their_bytes():
    def look():
        world = find_world(None)
        for each in world.processes:
            each.read_ranks()
        calls = {call.op: call.nbytes for each in world.processes for call in each.calls.values()}
        world.close()
        return calls

    calls = while_it_runs(look)
    assert (calls["compute"], calls["all_reduce"]) == (0, 4096)


def test_who_is_no_job_is_told_in_one_line():
    error = error_of(UsageError, find_world, None)
    assert str(error) == "no world of yours runs on this host; start one with `overlap run`"
    error = error_of(UsageError, find_world, "x")
    assert str(error) == "JOB: 'x' is no running job, program or process of one; running on this host: none"


def test_the_place_of_a_job_elsewhere_is_refused_with_what_shows_it(capsys):
    assert main(["top", "node1:29500"]) == 2
    error = capsys.readouterr().err
    assert "JOB: expected the name of a job on this host, got the address 'node1:29500'; " in error
    assert "its ranks are seen on the host where they run: ssh node1 overlap top" in error


def test_the_list_has_names_that_can_be_copied(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["a_long_path/" * 20 + "with_a_long_name_" * 3 + "train.py"])
    text = while_it_runs(lambda: said(capsys, "top"))

    def job():
        world = find_world(None)
        world.close()
        return world.start.job

    assert len(text.splitlines()[1].split()[0]) == len(while_it_runs(job))
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("name", ["train.py", "./train.py", "there/train.py", "{folder}/there/train.py"])
def test_a_job_is_found_by_its_program(capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["there/train.py"])
    text = while_it_runs(lambda: said(capsys, "top", "--once", name.format(folder=tmp_path)))
    assert text.startswith("train.py: 2 ranks in 1 process, ")


def test_jobs_of_one_program_are_listed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])

    def refused():
        return str(error_of(UsageError, find_world, "train.py"))

    def jobs():
        worlds = find_running_worlds()
        for world in worlds:
            world.close()
        return [world.start.job for world in worlds]

    first, second = while_it_runs(lambda: while_it_runs_too(lambda: jobs()))
    assert first != second
    message = while_it_runs(lambda: while_it_runs_too(refused))
    told = r"JOB: 'train\.py' is the program of several running jobs, name one of them: "
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
    assert "--every: expected 0.1 to 3600 s, got 0" in capsys.readouterr().err


def test_what_is_no_record_is_overlooked(folder):
    (folder / "x.flight").write_bytes(b"no")
    (folder / "y.flight").write_bytes(b"")
    os.mkfifo(folder / "z.flight")
    assert find_running_worlds() == []


class Ending:
    """A world of real records that lives for some looks."""

    def __init__(self, world, looks):
        self._world, self.left = world, looks

    def __getattr__(self, name):
        return getattr(self._world, name)

    @property
    def lives(self):
        self.left -= 1
        return self.left >= 0


def test_in_a_pipe_each_look_is_a_line_until_the_job_ends(capsys, monkeypatch):
    monkeypatch.setattr(top, "sleep", lambda for_s: None)
    monkeypatch.setattr(top, "find_world", lambda name: Ending(find_world(name), 30))
    text = while_it_runs(lambda: said(capsys, "top", "--every", "1"))
    lines = text.splitlines()
    assert 2 <= len(lines) <= 10
    assert all(re.match(r"overlap: \d\d:\d\d:\d\d step 3", line) for line in lines)


def test_a_look_that_is_dear_is_followed_by_a_longer_pause(monkeypatch):
    slept = []
    monkeypatch.setattr(top, "sleep", slept.append)
    monkeypatch.setattr(top, "process_time", iter([0.0, 0.05]).__next__)

    def look():
        world = find_world(None)
        looks = Looks(Ending(world, 1000), every_s=1.0)
        looks.look_now()
        looks.wait_for_next()
        world.close()

    while_it_runs(look)
    assert sum(slept) == pytest.approx(5.0)


@pytest.mark.parametrize(("height", "rows"), [(24, 16), (10, 5)])
def test_ranks_that_are_alike_share_rows_that_fit(monkeypatch, height, rows):
    monkeypatch.setenv("FORCE_COLOR", "1")
    found = []

    async def program(rank):
        for _ in range(rank.rank % 4):
            await rank.compute(time.sleep, 0.002)
        await rank.barrier()
        if rank.rank == 0:
            world = find_world(None)
            console = top.Console(width=80)
            console.size = console.size.__class__(80, height)
            with console.capture() as captured:
                console.print(draw_window(Looks(world, every_s=5.0).look_now(), world, console))
            found.append(captured.get().splitlines())
            world.close()
        await rank.barrier()

    overlap.run(program, ranks=16)
    assert len(found[0]) < height
    assert len([line for line in found[0] if "█" in line or "░" in line or "▄" in line]) <= rows


def test_the_command_follows_a_job_on_a_terminal_to_its_end(tmp_path, monkeypatch):
    """The real thing: a process of its own, on a pseudo-terminal, at a world that ends."""
    pty = pytest.importorskip("pty", reason="needs a system with pseudo-terminals")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    written, drawn, ended = bytearray(), threading.Event(), []

    def follow():
        process = subprocess.Popen(
            [sys.executable, "-m", "overlap", "top", "--every", "0.1", str(os.getpid())],
            stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color", "COLUMNS": "100"},
        )  # fmt: skip
        os.close(slave)
        with suppress(OSError):  # how Linux says that nobody has it open
            while piece := os.read(master, 1 << 16):
                written.extend(piece)
                if written.count(b": 2 ranks in 1 process, ") > 2:
                    drawn.set()
        drawn.set()
        os.close(master)
        ended.append(process.wait(timeout=60))

    async def program(rank):
        await rank.barrier()
        if rank.rank == 0:
            watcher = threading.Thread(target=follow)
            watcher.start()
            await rank.compute(drawn.wait, 60)
        await rank.barrier()
        return watcher if rank.rank == 0 else None

    watcher, _ = overlap.run(program, ranks=2)
    watcher.join()
    assert ended == [0]
    text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "\n", written.decode())
    assert "flight" in text
    assert max(map(len, text.replace("\r", "").split("\n"))) <= 100
