"""Processes of Python that have imported overlap at once, without the 0.3 s of CPU that a new interpreter needs for it.

Each is forked by `tests/fork_server.py`, of which every process that runs tests has one, and is otherwise what
`subprocess` would start: `Python("-m", "overlap", "run", "train.py", ...)`. Tests that are about how an interpreter
starts (its options, `PYTHON...` variables but the path, closed streams, `sitecustomize`) start a real one.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any, Self

ROOT = Path(__file__).parents[1]
Stream = int | IO[Any]  # also `subprocess.PIPE` and `DEVNULL`


class Server:
    """The process that forks, started when it is first needed.

    Its socket is there from the beginning: what is opened within a test would seem to be left behind by it.
    """

    def __init__(self) -> None:
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, object], descriptors: list[int]) -> None:
        self._process = self._process or self._start()
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(self._theirs.fileno())],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            pass_fds=[self._theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._theirs.close()
        return process

    def close(self) -> None:
        self._requests.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait()


_SERVER = Server()
atexit.register(_SERVER.close)


class Python:
    """A process, as if `subprocess.Popen` had started `python ARGV`.

    Attributes:
        pid: Of the process.
        stdin: Our end, where `subprocess.PIPE` was asked for; likewise `stdout` and `stderr`.
    """

    def __init__(
        self,
        *argv: object,
        cwd: str | Path,
        env: Mapping[str, str] = os.environ,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
        text: bool = True,
        start_new_session: bool = False,
    ) -> None:
        request = {"argv": [*map(str, argv)], "cwd": str(cwd), "env": dict(env), "session": start_new_session}
        inputs, outputs, errors = _pipe(stdin, theirs=0), _pipe(stdout, theirs=1), _pipe(stderr, theirs=1)
        self._news, told = os.pipe()
        self._told = b""
        theirs = [inputs[0], outputs[0], errors[0], told]
        try:
            _SERVER.ask(request, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.stdin = _opened(inputs[1], "w", text)
        self.stdout, self.stderr = _opened(outputs[1], "r", text), _opened(errors[1], "r", text)
        self._hear(1, None)
        self.pid = int(self._told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def __del__(self) -> None:
        os.close(self._news)

    @property
    def returncode(self) -> int | None:
        _, _, code = self._told.partition(b"\n")
        return int(code) if code else None

    def poll(self) -> int | None:
        self._hear(2, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._hear(2, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its parent has not yet told us so
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Let it have its input, and wait for all its output and for its end."""
        heard: dict[str, Any] = {}
        listening = [
            Thread(target=lambda name=name, stream=stream: heard.update({name: stream.read()}))
            for name, stream in (("out", self.stdout), ("err", self.stderr))
            if stream is not None and not stream.closed
        ]
        for thread in listening:
            thread.start()
        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError):
                if given:
                    self.stdin.write(given)
                self.stdin.close()
        limit_s = None if timeout is None else time.monotonic() + timeout
        for thread in listening:
            thread.join(_left_s(limit_s))
            if thread.is_alive():
                raise subprocess.TimeoutExpired("python", timeout or 0)
        self.wait(_left_s(limit_s))
        self._close()
        return heard.get("out"), heard.get("err")

    def _hear(self, lines: int, timeout: float | None) -> None:
        """Take in what is told of the process: its pid in the first line, its exit code in the second."""
        limit_s = None if timeout is None else time.monotonic() + timeout
        while self._told.count(b"\n") < lines and select.select([self._news], [], [], _left_s(limit_s))[0]:
            news = os.read(self._news, 64)
            assert news, "the process that forks has ended"
            self._told += news

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def run(
    *argv: object, cwd: str | Path, env: Mapping[str, str] = os.environ, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGV` to its end; what hangs is killed."""
    with Python(*argv, cwd=cwd, env=env) as python:
        try:
            out, err = python.communicate(timeout=timeout)
        except BaseException:
            python.kill()
            raise
    return subprocess.CompletedProcess([*argv], python.wait(), out, err)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who finds this checkout and has no settings of overlap, and `more`."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OVERLAP_")}
    return plain | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"} | more


def launch(
    folder: Path, program: str, *options: str, timeout: float = 90, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Write a program into `train.py` of a folder, and run it there by `overlap run` to its end."""
    (folder / "train.py").write_text(program)
    command = ("-m", "overlap", "run", *options, "train.py")
    return run(*command, cwd=folder, env=environment(**variables), timeout=timeout)


def free_port() -> int:
    """Return a port of this host at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _left_s(limit_s: float | None) -> float | None:
    return None if limit_s is None else max(0.0, limit_s - time.monotonic())


def _pipe(stream: Stream, *, theirs: int) -> tuple[int, int]:
    """Return the end that the process gets, and ours, which is -1 where it does not speak with us."""
    if stream == subprocess.PIPE:
        ends = os.pipe()
        return ends[theirs], ends[1 - theirs]
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), -1
    return os.dup(stream if isinstance(stream, int) else stream.fileno()), -1


def _opened(descriptor: int, mode: str, text: bool) -> IO[Any] | None:
    return None if descriptor < 0 else open(descriptor, mode if text else f"{mode}b")
