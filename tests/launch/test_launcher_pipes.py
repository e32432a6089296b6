"""The launcher's parts: what they do with pipes, lines and the secret."""

import os
import signal
import stat
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from overlap import UsageError
from overlap.launch import launcher
from overlap.launch.jobs import LaunchSpec
from overlap.launch.lifeline import join_launcher, tie_to_pipe
from overlap.launch.output import (
    LONGEST_BYTES,
    READ_BYTES,
    STDOUT,
    LineBuffer,
    OutputError,
    Relay,
    Screen,
    line_prefix,
    open_log,
    write_log,
)
from overlap.processes.secret import ADVICE, find_secret, generate_secret, user_secret, write_to_nameless_file
from tests.errors import error_of
from tests.threads import run_threads

# -- what the launcher's parts do with pipes, in one process -----------------------------------------------------------


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
        relay.limit_remaining_output()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay.run)
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(1.0)
        assert os.read(shown, 100) == b"> one\n> two\n"
        assert list(relay.tail) == [b"one\n", b"two\n"]

    clock = trio.testing.MockClock()
    trio.run(main, clock, clock=clock)


async def test_a_witness_that_does_not_answer_holds_up_no_launcher(monkeypatch, tmp_path):
    answers = threading.Event()
    monkeypatch.setattr(launcher, "_WITNESS_S", 0.1)
    monkeypatch.setattr(launcher._Launcher, "_ask_witness", lambda *_: answers.wait())
    spec = LaunchSpec(
        command=[sys.executable, "-c", "raise SystemExit(3)"], environ=os.environ, nodes=1, here=range(1),
        ranks_per_node=1, endpoint=("127.0.0.1", 0), listener=None, job="", secret=b"of this test", prefix=False,
        colour=False, log_dir=None, grace_s=1, report=print, witness=str(tmp_path),
    )  # fmt: skip
    with trio.fail_after(20):
        outcome = await launcher.launch(spec)
    answers.set()
    assert [ending.returncode for ending in outcome.endings] == [3]


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
            relay.log_pending_output()
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


# -- launcher lines ----------------------------------------------------------------------------------------------------


def cut(*pieces, times=None):
    lines = LineBuffer()
    found = [line for piece, now_s in zip(pieces, times or [0.0] * len(pieces), strict=True)
             for line in lines.feed(piece, now_s=now_s)]  # fmt: skip
    return found, lines.end()


@pytest.mark.parametrize(
    ("pieces", "lines", "left"),
    [
        ((b"a\nb\n",), [b"a\n", b"b\n"], []),
        ((b"a", b"b\n", b"c"), [b"ab\n"], [b"c\n"]),
        ((b"a\r\nb\r", b"\nc\r\r\n"), [b"a\n", b"b\n", b"c\n"], []),
        ((b"\n\n",), [b"\n", b"\n"], []),
        ((b"\xff\x00\n\xfe",), [b"\xff\x00\n"], [b"\xfe\n"]),
        ((), [], []),
    ],
)
def test_lines_are_whole(pieces, lines, left):
    assert cut(*pieces) == (lines, left)


def test_of_a_progress_bar_a_state_a_second_is_shown_and_the_last():
    pieces = [b"\r%d %%" % number for number in range(6)]
    assert cut(*pieces, times=[0.0, 0.2, 0.4, 1.3, 1.5, 2.0]) == ([b"0 %\n", b"2 %\n"], [b"5 %\n"])
    assert cut(*pieces, b"\rdone\n") == ([b"0 %\n", b"done\n"], [])


def test_the_last_state_is_shown_even_if_it_came_too_early():
    assert cut(b"1 %\r2 %\r", b"") == ([b"1 %\n"], [b"2 %\n"])
    assert cut(b"1 %\r2 %\r3 %\r\r") == ([b"1 %\n"], [b"3 %\n"])


def test_a_line_without_end_is_let_go_in_pieces():
    found, left = cut(*[b"x" * 1000] * 200)
    assert [len(line) for line in [*found, *left]] == [LONGEST_BYTES + 1] * 3 + [200_000 - 3 * LONGEST_BYTES + 1]


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b""))), st.data())
def test_pieces_of_any_size_give_the_same_lines(lines, data):
    text = b"\n".join(lines)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    found, left = cut(*pieces)
    assert b"".join(found + left) == (text if text.endswith(b"\n") or not text else text + b"\n")


def test_prefixes():
    assert line_prefix(3, colour=False) == b"[process 3] "
    assert line_prefix(0, colour=True) == b"\x1b[36m[process 0]\x1b[0m "
    assert line_prefix(0, colour=True) != line_prefix(1, colour=True)


# -- launcher secret ---------------------------------------------------------------------------------------------------

HEX = "00ff" * 16


def private(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return {"OVERLAP_SECRET_FILE": str(path)}


def refusal(environ):
    return str(error_of(UsageError, find_secret, environ))


def test_hexadecimal_digits_are_bytes_and_text_is_text(tmp_path):
    assert find_secret({"OVERLAP_SECRET": HEX}) == bytes.fromhex(HEX)
    assert find_secret({"OVERLAP_SECRET": "correct horse"}) == b"correct horse"
    assert find_secret(private(tmp_path / "s", HEX + "\n")) == bytes.fromhex(HEX)
    assert find_secret({}) is None


def test_the_variable_is_taken_out_of_the_environment_once_it_is_read(monkeypatch):
    monkeypatch.setattr("overlap.processes.secret._removed", {})
    monkeypatch.setenv("OVERLAP_SECRET", HEX)
    assert find_secret(os.environ) == bytes.fromhex(HEX)
    assert "OVERLAP_SECRET" not in os.environ
    assert find_secret(os.environ) == bytes.fromhex(HEX)  # the next world of this process needs it too
    monkeypatch.setenv("OVERLAP_SECRET", "another secret")
    assert find_secret(os.environ) == b"another secret"


@pytest.mark.parametrize("system", ["Linux", "another", "a container that forbids it"])
def test_what_is_handed_over_is_read_back_each_time_and_wins(system, monkeypatch):
    if system == "another":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif system != "Linux":
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    secret = generate_secret()
    descriptor = write_to_nameless_file(secret)
    try:
        environ = {"OVERLAP_SECRET_FD": str(descriptor), "OVERLAP_SECRET": HEX}
        assert len(secret) == 32
        assert find_secret(environ) == find_secret(environ) == secret
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    environ = private(tmp_path / "s", HEX, 0o640)
    assert refusal(environ) == f"{tmp_path / 's'}: others can read it (mode 0640); chmod go= {tmp_path / 's'}"


def test_what_is_no_secret_is_named_without_being_shown(tmp_path):
    assert refusal({"OVERLAP_SECRET_FILE": str(tmp_path / "x")}).endswith(
        "x: there is no such file; write a secret into it"
    )
    assert "no plain file or folder" in refusal({"OVERLAP_SECRET_FILE": str(tmp_path)})
    assert refusal(private(tmp_path / "s", "")).startswith("OVERLAP_SECRET_FILE: a secret of 0 bytes can be guessed")
    short = refusal({"OVERLAP_SECRET": "hunter2"})
    assert short.startswith("OVERLAP_SECRET: a secret of 7 bytes can be guessed; give every process the same ")
    assert "hunter2" not in short
    assert "expected a descriptor from `overlap run`, got 'x'" in refusal({"OVERLAP_SECRET_FD": "x"})


def test_processes_of_one_user_share_a_secret_that_nobody_else_can_read(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    found = []
    run_threads(threading.Thread(target=lambda: found.append(user_secret(environ))) for _ in range(8))
    assert found == [user_secret(environ)] * 8
    assert len(found[0]) == 32
    [folder] = tmp_path.iterdir()
    [file] = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, file)] == [0o700, 0o600]


def test_a_folder_that_others_can_enter_is_not_trusted(tmp_path):
    folder = tmp_path / f"overlap-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match=r"others can read it \(mode 0755\)"):
        user_secret({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_link_instead_of_the_folder_is_not_trusted(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / f"overlap-{os.getuid()}").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="no plain file or folder"):
        user_secret({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_secret_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "s"
    assert refusal({"OVERLAP_SECRET_FILE": str(inside)}) == f"{inside}: Not a directory; {ADVICE}"
    (tmp_path / "loop").symlink_to("loop")
    assert refusal({"OVERLAP_SECRET_FILE": str(tmp_path / "loop")}).startswith(f"{tmp_path / 'loop'}: Too many levels")
    assert (
        refusal({"OVERLAP_SECRET_FILE": "/none"})
        == "OVERLAP_SECRET_FILE: /none: there is no such file; write a secret into it"
    )
