"""The event loop hears of messages whenever they come: while it is awake, asleep, or about to sleep."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import numpy as np
import trio

from transports.shared_memory.engine import bells

from ..efa.processes import TIMEOUT_S, opened, run
from .processes import Host

PASSES = 300
SLEEPERS, UNATTENDED, BY_LOOP = 1, 3, 2  # see native/engine.h


def test_no_message_is_overlooked_whenever_it_comes() -> None:
    async def main() -> int:
        host, came = Host(), 0
        async with opened(host.transports):
            here, there = host.transports
            due: SimpleQueue[int | None] = SimpleQueue()

            def send() -> None:
                for number in iter(due.get, None):
                    data = np.array([number])
                    there.engine.send(0, 5, 0, b"", None, 8, memoryview(data).cast("B"), 1 << 32 | 0, 0, None)

            thread = threading.Thread(target=send)
            thread.start()
            out, end = np.zeros(1, int), here.wire(0)
            for number in range(PASSES):
                due.put(number)
                for _ in range(number % 5):
                    await trio.lowlevel.checkpoint()
                await end.recv_into(1, 5, out)
                came += int(out[0] == number)
            due.put(None)
            thread.join(TIMEOUT_S)
        return came

    assert run(main) == PASSES


def test_a_loop_that_sleeps_notices_a_message_though_a_thread_is_woken_that_does_not_sleep() -> None:
    async def main() -> int:
        host, data, out = Host(), np.array([7]), np.zeros(1, int)
        async with opened(host.transports):
            here, there = host.transports
            words = bells(here._boards.segment.view).cast("I")

            def send() -> None:
                late = time.monotonic() + TIMEOUT_S
                while words[UNATTENDED] != BY_LOOP and time.monotonic() < late:
                    time.sleep(0.001)
                words[SLEEPERS] = 7
                there.engine.send(0, 5, 0, b"", None, 8, memoryview(data).cast("B"), 1 << 32 | 0, 0, None)

            thread = threading.Thread(target=send)
            thread.start()
            await here.wire(0).recv_into(1, 5, out)
            thread.join(TIMEOUT_S)
        return int(out[0])

    assert run(main) == 7
