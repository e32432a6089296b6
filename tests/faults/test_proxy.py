"""Whole jobs through a proxy that damages or cuts what it carries: right results, or an error that names the peer."""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.interpreters import environment, free_port

from .job import LIMIT_S

PROGRAM = """
import numpy as np, overlap

async def main(rank):
    for _ in range(20):
        total = await rank.all_reduce(np.arange(2000.0) * (rank.rank + 1))
        assert np.array_equal(total, np.arange(2000.0) * 3), "wrong"
    return "right"

print(overlap.run(main, timeout_s=60)[0])
"""

# The control connection carries about 1,100 bytes towards process 0 and 1,500 from it: the first 250 meet and prove.
FAULTS = [
    pytest.param(act, way, at, id=f"{act} {'from' if way else 'towards'} process 0 at {at}")
    for act, way, at in [
        ("none", 0, 0), ("flip", 0, 3), ("flip", 0, 81), ("flip", 0, 241), ("flip", 1, 20), ("flip", 1, 140),
        ("flip", 1, 700), ("flip", 0, 800), ("reset", 0, 10), ("reset", 0, 106), ("reset", 1, 300), ("reset", 1, 900),
    ]
]  # fmt: skip


class Proxy:
    """Carries connections to a port, and does one thing to the byte at a place of what goes one way."""

    def __init__(self, far: int, act: str, way: int, at: int) -> None:
        self._far, self._act, self._way, self._at = far, act, way, at
        self._carried = [0, 0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def close(self) -> None:
        """Listen no longer, and wait for the connections, whose ends have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._far))
                except ConnectionRefusedError:  # process 0 does not listen yet
                    near.close()
                    continue
                for way, (a, b) in enumerate([(near, far), (far, near)]):
                    self._start(self._carry, a, b, way)

    def _carry(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                begin = self._carried[way]
                self._carried[way] += len(data)
                if way == self._way and begin <= self._at < self._carried[way]:
                    if self._act == "flip":
                        data[self._at - begin] ^= 4
                    if self._act == "reset":
                        for end in (source, sink):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.mark.faults
@pytest.mark.parametrize(("act", "way", "at"), FAULTS)
def test_a_job_through_a_proxy(tmp_path: Path, act: str, way: int, at: int) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    port = free_port()
    proxy = Proxy(port, act, way, at)
    environ = environment(OVERLAP_JOIN_TIMEOUT_S="15", OVERLAP_SECRET="of both nodes")
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "overlap", "run", "--nnodes", "2", "--ranks-per-process", "1", "--node-rank",
             str(node), "--rdzv-endpoint", f"127.0.0.1:{door}", "train.py"],
            cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node, door in enumerate([port, proxy.port])
    ]  # fmt: skip
    try:
        said = [node.communicate(timeout=2 * LIMIT_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
        proxy.close()
    codes = [node.returncode for node in nodes]
    if act == "none":
        assert codes == [0, 0], said
    for node, (code, (out, err)) in enumerate(zip(codes, said, strict=True)):
        assert "Traceback" not in err
        assert "wrong" not in out + err
        if code == 0:
            assert out == f"[process {node}] right\n"
        else:
            assert (code, f"process {1 - node}" in err) == (1, True), err
