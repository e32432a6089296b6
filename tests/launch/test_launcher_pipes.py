"""What the launcher's parts do with pipes, in one process."""

import os
import signal
import subprocess
import sys

import pytest
import trio
import trio.testing

from overlap import UsageError
from overlap.launch.lifeline import join_launcher, tie_to_pipe
from overlap.launch.output import READ_BYTES, STDOUT, OutputError, Relay, Screen, open_log, write_log


class Pipes:
    """Opens pipes, and closes what the test has not."""

    def __init__(self):
        self.ends = []

    def __call__(self):
        self.ends.extend(os.pipe())
        return self.ends[-2:]

    def close(self, end):
        self.ends.remove(end)
        os.close(end)


@pytest.fixture
def pipe():
    pipes = Pipes()
    yield pipes
    for end in list(pipes.ends):
        pipes.close(end)


def full(descriptor):
    """Write until the pipe takes no more; return how much it took."""
    os.set_blocking(descriptor, False)
    count = 0
    try:
        while True:
            count += os.write(descriptor, b"x" * 99 + b"\n")
    except BlockingIOError:
        return count


async def test_a_program_is_not_read_faster_than_its_output_is(pipe):
    (reads, prints), (shown, writes) = pipe(), pipe()
    relay = Relay(reads, writes, screen=Screen())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run)
        sent = full(prints)
        await trio.testing.wait_all_tasks_blocked()
        while more := full(prints):
            sent += more
            await trio.testing.wait_all_tasks_blocked()
        assert sent < 8 * READ_BYTES  # two pipes and what is on the way between them
        pipe.close(prints)
        got = b""
        while len(got) < sent:
            await trio.lowlevel.wait_readable(shown)
            got += os.read(shown, READ_BYTES)
    assert got == (b"x" * 99 + b"\n") * (sent // 100) + b"x" * (sent % 100) + b"\n" * (sent % 100 > 0)


def test_what_a_gone_process_has_written_is_shown_though_the_pipe_stays_open(pipe):
    async def main(clock):
        (reads, prints), (shown, writes) = pipe(), pipe()
        os.write(prints, b"one\ntwo")
        relay = Relay(reads, writes, screen=Screen(), prefix=b"> ")
        relay.hurry()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.run)
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(1.0)
        assert os.read(shown, 100) == b"> one\n> two\n"
        assert list(relay.tail) == [b"one\n", b"two\n"]

    clock = trio.testing.MockClock()
    trio.run(main, clock, clock=clock)


async def test_many_writers_never_tear_a_line(pipe):
    shown, writes = pipe()
    screen = Screen()
    lines = [bytes([65 + number]) * 9000 + b"\n" for number in range(8)]
    got = b""
    async with trio.open_nursery() as nursery:
        for line in lines:
            nursery.start_soon(screen.write, writes, [line])
        while len(got) < sum(map(len, lines)):
            await trio.lowlevel.wait_readable(shown)
            got += os.read(shown, 1000)
    assert sorted(got.splitlines(keepends=True)) == lines


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_what_cannot_be_written_is_told_with_its_place():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OutputError, match=r"^cannot write the output: No space left on device$"):
        trio.run(Screen().write, descriptor, [b"x\n"])
    os.close(descriptor)
    with (
        open_log("/dev/full") as log,
        pytest.raises(OutputError, match=r"^cannot write /dev/full: No space left on device$"),
    ):
        write_log(log, [b"x\n"])


def test_a_file_is_written_as_well_as_a_pipe(tmp_path):
    with open(tmp_path / "out", "wb") as file:
        trio.run(Screen().write, file.fileno(), [b"a\n" * 9999])
    assert (tmp_path / "out").read_bytes() == b"a\n" * 9999


def test_a_log_takes_lines_without_a_prefix(pipe, tmp_path):
    reads, prints = pipe()
    os.write(prints, b"one\n")
    pipe.close(prints)
    with open_log(str(tmp_path / "log")) as log:
        trio.run(Relay(reads, STDOUT, screen=Screen(), prefix=b"> ", log=log).run)
    assert (tmp_path / "log").read_bytes() == b"one\n"


# -- lifeline ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets the kernel send the signal")
def test_the_launcher_ties_a_process_that_has_not_started_to_hold_its_lifeline(pipe):
    reads, writes = pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); sum(range(10**15))"],
        pass_fds=[reads],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    with child:
        assert tie_to_pipe(reads, child.pid)
        pipe.close(reads)
        assert child.stdout.readline() == b"\n"
        pipe.close(writes)
        assert child.wait(60) == -signal.SIGKILL


HOLDS = """
import os, sys
if sys.argv[1] == "thread":
    import fcntl
    del fcntl.F_SETSIG
from overlap.launch.lifeline import join_launcher
told = os.environ["OVERLAP_LIFELINE_FD"]
joined = join_launcher()
is_member = os.environ["OVERLAP_MEMBER_PID"] == str(os.getpid())
print(joined, join_launcher(), is_member, os.get_inheritable(int(told)), flush=True)
while True:
    pass
"""


@pytest.mark.everyday(1)
@pytest.mark.parametrize("way", ["kernel", "thread"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_holds_its_lifeline(pipe, way, when):
    reads, writes = pipe()
    if when == "before":
        pipe.close(writes)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, way],
        pass_fds=[reads],
        env=os.environ | {"OVERLAP_LIFELINE_FD": str(reads)},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    with child:
        if when == "after":
            assert child.stdout.readline() == b"True False True False\n"
            pipe.close(writes)
        assert child.wait(60) == -signal.SIGKILL


async def test_what_was_printed_is_in_the_log_before_what_the_process_says_elsewhere(tmp_path):
    """The two come by pipes of their own, so that the launcher may find what was said later first."""
    reads, writes = os.pipe()
    try:
        with open_log(str(tmp_path / "log")) as log:
            relay = Relay(reads, STDOUT, screen=Screen(), log=log)
            os.write(writes, b"hello\nwor")
            relay.catch_up()
            write_log(log, [b"the end\n"])
            os.write(writes, b"ld\n")
            os.close(writes)
            await relay.run()
    finally:
        os.close(reads)
    assert (tmp_path / "log").read_bytes() == b"hello\nthe end\nworld\n"


def test_without_a_launcher_there_is_nothing_to_take():
    assert not join_launcher({})
    assert not join_launcher({"OVERLAP_LIFELINE_FD": "3", "OVERLAP_MEMBER_PID": "1"})


def test_descriptors_that_are_not_open_are_told(pipe):
    reads, _ = pipe()
    pipe.close(reads)
    with pytest.raises(UsageError, match=r"the descriptors of OVERLAP_\*_FD are not open here"):
        join_launcher({"OVERLAP_LIFELINE_FD": str(reads)})
