"""The live screens on a terminal: what stands on it while a job runs, when it is resized, and when the job ends."""

import io
import os
import select
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap.cli import livescreen
from overlap.cli.livescreen import Show, is_terminal
from overlap.flight.reading import CallWords, RankTable
from overlap.live.worlds import Sampler
from tests.live.terminal import Terminal

pty = pytest.importorskip("pty", reason="needs a system with pseudo-terminals")
MS = 1_000_000


class FakeWorld:
    """So many ranks, of which each does one thing; it lives for so many looks."""

    job, script, where, age_s = "5f2c", "/home/me/train.py", "1 process", 75.0

    def __init__(self, ranks, looks, *, apart_ms=10):
        self.size, self._looks, self._taken, self._apart_ms = ranks, looks, 0, apart_ms
        self._calls = {
            1: CallWords("backward", "compute", "", (), "train.py:7", 0),
            2: CallWords("bucket 0", "all_reduce", "world", tuple(range(ranks)), "train.py:8", 1 << 20),
        }

    @property
    def lives(self):
        return self._taken < self._looks

    def snapshot(self):
        self._taken += 1
        return 1000 * MS, [(("here", 0), self._glance(rank), self._calls) for rank in range(self.size)]

    def _glance(self, rank):
        begun = self._apart_ms * rank
        rows = [(0, 0, 1, 3, (500 + begun) * MS, begun * MS or 1), (0, 0, 2, 3, 900 * MS, (500 + begun) * MS)]
        return RankTable(rank, 3, False, np.array(rows, np.int64).T)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No waiting between looks, and a terminal of 80 columns and 24 rows."""
    monkeypatch.setattr(livescreen, "_pause", lambda for_s, goes_on: goes_on())
    sized(monkeypatch, 80, 24)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def sized(monkeypatch, columns, rows):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))


def show(world, file):
    return Show(world, Sampler(world, every_s=1.0), file, ascii=False)


class Written(io.StringIO):
    """A file that is a terminal, and shows on one at once what is written."""

    def __init__(self, terminal):
        super().__init__()
        self._terminal, self.frames = terminal, []

    def write(self, text):
        self._terminal.feed(text)
        return super().write(text)

    def flush(self):
        if self._terminal.on_alternate and self._terminal.text[0]:
            self.frames.append((self._terminal.text, self._terminal.cursor_shown))


HEAD = "train.py: 4 ranks in 1 process, 1 min 15 s; job 5f2c"
SUMS = "step 3: compute 50%, hidden 0%, exposed 38%: 2% waiting, 37% wire"
LEGEND = "█ compute  ▄ hidden comm  ░ waiting for a rank  █ on the wire"


def test_a_screen_of_80x24_has_a_row_for_each_rank_and_is_left_as_it_was():
    terminal = Terminal()
    terminal.feed("$ overlap top\n")
    file = Written(terminal)
    show(FakeWorld(4, 2, apart_ms=100), file).full_screen()
    drawn, cursor_shown = file.frames[0]
    assert not cursor_shown
    assert drawn[0] == HEAD
    assert [line.split()[0] for line in drawn[5:9]] == ["3", "0", "1", "2"]  # who is waited for first
    assert drawn[9] == LEGEND
    assert drawn[10:] == [""] * 14
    assert (terminal.on_alternate, terminal.cursor_shown) == (False, True)
    assert terminal.text[:11] == ["$ overlap top", *drawn[:10]]


def test_more_ranks_than_rows_share_rows_and_nothing_scrolls_away():
    terminal = Terminal()
    file = Written(terminal)
    show(FakeWorld(64, 1), file).full_screen()
    drawn = file.frames[0][0]
    assert drawn[0].startswith("train.py: 64 ranks")
    assert LEGEND in drawn
    assert drawn[23] == ""
    assert any(" like " in line for line in drawn)


def test_on_paper_there_are_plain_lines(capsys):
    world = FakeWorld(4, 2)
    show(world, sys.stdout).on_paper()
    said, _ = capsys.readouterr().out.splitlines()
    assert said.startswith("overlap: ")
    assert said.isascii()
    assert said.endswith(f"{SUMS}; waited for: rank 3, 100% of all waiting; moved: 4 MiB/s in process")


@pytest.mark.parametrize(("key", "ends"), [(b"q", True), (b"Q", True), (b"x", False), (b"\x04", False)])
def test_q_ends_a_screen_and_no_other_key(monkeypatch, key, ends):
    master, slave = pty.openpty()
    with os.fdopen(master, "wb", buffering=0) as keyboard, os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with livescreen._keys() as pressed:
            assert not pressed()
            keyboard.write(key)
            select.select([terminal], [], [])
            assert pressed() == ends
            assert not pressed()


def test_a_dumb_terminal_and_a_pipe_are_paper(monkeypatch):
    master, slave = pty.openpty()
    with os.fdopen(master), os.fdopen(slave, "w") as terminal, open(os.devnull, "w") as pipe:
        monkeypatch.setenv("TERM", "xterm-256color")
        assert (is_terminal(terminal), is_terminal(pipe)) == (True, False)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_terminal(terminal)


def test_colours_are_only_where_they_are_wanted(monkeypatch):
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        file = Written(Terminal())
        show(FakeWorld(4, 1), file).full_screen()
        assert ("\x1b[38" in file.getvalue() or "\x1b[3" in file.getvalue()) is coloured


def test_the_command_follows_a_job_on_a_terminal_to_its_end(tmp_path, monkeypatch):
    """The real thing: a process of its own, on a pseudo-terminal that is resized, at a world that ends."""
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen, resized, ended = [], threading.Event(), []

    def follow():
        ended.append(on_terminal(tmp_path, seen, resized))

    async def program(rank):
        await rank.barrier()
        if rank.rank == 0:
            watcher = threading.Thread(target=follow)
            watcher.start()
            await overlap_wait(resized, watcher)
        await rank.barrier()
        return watcher if rank.rank == 0 else None

    watcher, _ = overlap.run(program, ranks=2)
    watcher.join()
    ((code, terminal),) = ended
    assert code == 0
    assert [size for size, _ in seen] == [(80, 24), (120, 30)]
    for (columns, rows), text in seen:
        assert ": 2 ranks in 1 process, " in text[0]
        assert len(text) == rows
        assert max(map(len, text)) <= columns
    assert (terminal.on_alternate, terminal.cursor_shown) == (False, True)
    assert ": 2 ranks in 1 process, " in terminal.text[0]


async def overlap_wait(event, thread):
    import trio

    while not event.is_set() and thread.is_alive():
        await trio.to_thread.run_sync(event.wait, 0.1)


def on_terminal(folder, seen, resized):
    """Run `overlap top` on a pseudo-terminal, look at two sizes of it, and follow it to its end."""
    import fcntl
    import termios

    def size(columns, rows):
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    master, slave = pty.openpty()
    size(80, 24)
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "overlap", "top", "--every", "0.1", str(os.getpid())],
        stdin=slave, stdout=slave, stderr=slave, cwd=folder,
        env=environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(slave)
    terminal, data = Terminal(), bytearray()
    with suppress(OSError):  # how Linux says that nobody has it open
        while piece := os.read(master, 1 << 16):
            data += piece
            while b"\x1b[H" in data:  # the beginning of the next frame
                frame, _, rest = bytes(data).partition(b"\x1b[H")
                data = bytearray(rest)
                columns, rows = sizes[min(len(seen), 1)]
                fits = terminal_of(terminal, frame, columns, rows)
                if fits and len(seen) < 2:
                    seen.append(((columns, rows), terminal.text))
                    if len(seen) == 1:
                        size(120, 30)
                        terminal.resize(120, 30)
                    else:
                        resized.set()
    resized.set()
    terminal.feed(data.decode())
    os.close(master)
    return process.wait(timeout=60), terminal


sizes = [(80, 24), (120, 30)]


def terminal_of(terminal, frame, columns, rows):
    terminal.feed(frame.decode() + "\x1b[H")
    heads = [line for line in terminal.text if line.startswith("rank")]
    return bool(heads) and (columns == 80 or len(heads[0]) > 80)
