"""The way from threads to the event loop."""

import pytest
import trio

from overlap.runtime.handover import Handover


def test_each_thread_that_posts_after_the_end_of_the_loop_hears_of_it() -> None:
    async def main() -> Handover:
        return Handover(trio.lowlevel.current_trio_token())

    handover = trio.run(main)
    for _ in range(3):
        with pytest.raises(trio.RunFinishedError):
            handover.post(print)
