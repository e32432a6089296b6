"""One process of two that exchange bytes over a bare socket: `python -m tests.benchmarks.two_hosts.raw HOST PORT ...`.

Nothing between the two threads of a process and the socket: what a link can carry in both directions at once. The
process that listens, rank 0, prints a line of JSON.
"""

import json
import socket
import sys
from threading import Thread
from time import perf_counter_ns

from overlap.cli.bench.sampling import Sampling


def main(rank: str, host: str, port: str, text: str, sizes: str) -> None:
    """Exchange as many bytes as an all-reduce of each size among two ranks sends each way."""
    sampling = Sampling(**json.loads(text))
    with _connected(int(rank), host, int(port)) as connection:
        samples = {size: _sampled(connection, int(size), sampling) for size in json.loads(sizes)}
    if rank == "0":
        print(json.dumps({"samples_ns": samples}), flush=True)


def _connected(rank: int, host: str, port: int) -> socket.socket:
    if rank:
        return _dialled(host, port)
    with socket.create_server((host, port)) as listener:
        return listener.accept()[0]


def _dialled(host: str, port: int) -> socket.socket:
    """Call until the other one listens."""
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            continue


def _sampled(connection: socket.socket, nbytes: int, sampling: Sampling) -> list[int]:
    sent, received = bytearray(nbytes), bytearray(nbytes)
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        _exchange(connection, bytearray(1), bytearray(1))  # a barrier
        begun_ns = perf_counter_ns()
        _exchange(connection, sent, received)
        samples.append(perf_counter_ns() - begun_ns)
    return samples[sampling.warmup :]


def _exchange(connection: socket.socket, sent: bytearray, received: bytearray) -> None:
    sender = Thread(target=connection.sendall, args=[sent])
    sender.start()
    left = memoryview(received)
    while left:
        left = left[connection.recv_into(left) :]
    sender.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
