"""Another process of the host: joins over its standard input and output, does as it is told, and kills itself."""

import base64
import os
import signal
import sys

import trio

from transports.request import Request
from transports.shared_memory import SharedMemory
from transports.shared_memory.memory_link import MemoryRequest

#: It takes much longer to move than to notice that it has begun.
LONG_BYTES = 128 << 20


async def exchange(name: str, mine: bytes) -> list[bytes]:
    print(base64.b64encode(mine).decode(), flush=True)
    return [base64.b64decode(sys.stdin.readline()), mine]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ignore(call: Request) -> None:
    pass


async def in_the_midst(call: Request | None) -> None:
    """Die once the other end has met it."""
    assert isinstance(call, MemoryRequest)
    while not call.op.met:
        await trio.lowlevel.checkpoint()
    die()


async def main(what: str) -> None:
    transport = SharedMemory(member=1, placement=((0,), (1,)), secret=b"of the tests", exchange=exchange)
    async with transport.open():
        end = transport.wire(1)
        starts = end.route(0)
        if what == "sends":
            await in_the_midst(starts.begin_send(0, 1, bytes(LONG_BYTES), done=ignore))
        elif what == "receives":
            await in_the_midst(starts.begin_recv(0, 1, None, LONG_BYTES, done=ignore))
        else:
            await end.recv_into(0, 1, bytearray(1))
            die()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
