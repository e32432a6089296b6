"""Another process of the host: joins over its standard input and output, does as it is told, and kills itself."""

from __future__ import annotations

import base64
import os
import signal
import sys

import trio

from transports.shared_memory import SharedMemory
from transports.starter import Call

#: Several pieces of reading.
LONG_BYTES = 8 << 20


async def exchange(name: str, mine: bytes) -> list[bytes]:
    print(base64.b64encode(mine).decode(), flush=True)
    return [base64.b64decode(sys.stdin.readline()), mine]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ignore(call: Call) -> None:
    pass


async def main(what: str) -> None:
    transport = SharedMemory(member=1, placement=((0,), (1,)), secret=b"of the tests", exchange=exchange)
    async with transport.open():
        end = transport.endpoint(1)
        if what == "sends":  # until it is killed
            await end.send(0, 1, bytes(LONG_BYTES))
        elif what == "receives":
            starts = end.starter(0)
            assert starts is not None
            starts.begin_recv(0, 1, None, LONG_BYTES, done=ignore, consume=die)
            await trio.sleep_forever()
        else:
            await end.recv_into(0, 1, bytearray(1))
            die()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
