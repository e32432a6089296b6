"""Programs that benchmarks run: what they say is heard at once, and nothing of them is left."""

import os
import select
import signal
import subprocess
import sys

import pytest

from overlap import OverlapError
from tests.benchmarks import children
from tests.benchmarks.children import Child, environment, read_json_lines

LIMIT_S = 60  # reached only by a process that outlives its end


@pytest.fixture
def child():
    """Return a function that starts a Python program as a child."""
    return lambda program, *argv: Child([sys.executable, "-c", program, *argv], environment())


def test_a_line_is_heard_before_the_next_is_said(child):
    program = "import sys\nprint('{\"a\": 1}', flush=True)\nopen(sys.argv[1]).read()\nprint('{}')"
    read, write = os.pipe()
    with os.fdopen(write, "w") as go_on:
        talker = Child([sys.executable, "-c", program, f"/proc/{os.getpid()}/fd/{read}"], environment())
        lines = read_json_lines([talker])
        assert next(lines) == {"a": 1}
        go_on.close()
        assert list(lines) == [{}]
    os.close(read)


def test_a_failure_is_an_error_after_what_was_said(child):
    heard = read_json_lines([child("print('{}')"), child("raise SystemExit(3)")])
    assert next(heard) == {}
    with pytest.raises(OverlapError, match="a process that was to be measured ended with exit code 3"):
        next(heard)


def test_who_stops_listening_leaves_no_process(child):
    talker = child("import signal\nprint('{}', flush=True)\nsignal.pause()")
    heard = read_json_lines([talker])
    assert next(heard) == {}
    heard.close()
    assert talker.returncode == -signal.SIGKILL


def test_what_is_measured_does_not_outlive_a_bench_that_is_killed():
    program = """
import signal, sys
from tests.benchmarks.children import Child, environment
child = Child([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"], environment())
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment())
    with parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        waiting = select.poll()
        waiting.register(child, select.POLLIN)
        assert waiting.poll(1000 * LIMIT_S)
    finally:
        os.close(child)


def test_settings_of_the_user_do_not_reach_what_is_measured(monkeypatch):
    started = []
    monkeypatch.setattr(children, "Child", lambda command, environ: started.append((command, environ)))
    for name in ("OVERLAP_RAILS", "OVERLAP_SECRET", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    children.start(["--processes", "2"], ["a.module", "text"], before=["nice"], variables={"OVERLAP_JOB": "b"})
    [(command, environ)] = started
    options = ("--processes", "2", "--no-prefix")
    assert command == ["nice", sys.executable, "-m", "overlap", "run", *options, "-m", "a.module", "text"]
    assert [name for name in environ if name.startswith("OVERLAP_")] == ["OVERLAP_JOB"]
    assert not {"RANK", "WORLD_SIZE"} & set(environ)
