"""What worlds change in the interpreter comes back when the last of them ends, in whatever order they end."""

import gc
import sys
import threading

import trio

import overlap
from overlap.runtime.interpreter import GC_THRESHOLD, SWITCH_INTERVAL_S, BlasLimit, tuned_interpreter
from tests.threads import run_threads


def settings() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


def test_settings_come_back_though_worlds_end_in_the_order_in_which_they_began() -> None:
    before = settings()
    first, second = tuned_interpreter(), tuned_interpreter()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_S * 1.01
    assert gc.get_threshold()[0] >= GC_THRESHOLD
    second.__exit__(None, None, None)
    assert settings() == before


def test_one_blas_thread_until_the_last_world_has_ended() -> None:
    from threadpoolctl import threadpool_info

    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before = threads()
    one, other = BlasLimit(), BlasLimit()
    one.impose()
    other.impose()
    one.lift()
    assert set(threads()) <= {1}
    other.lift()
    assert threads() == before


def test_two_worlds_in_two_threads_leave_nothing_changed() -> None:
    before, inside = settings(), threading.Barrier(2, timeout=30)
    failures: list[BaseException] = []

    async def main(rank: overlap.Rank) -> None:
        await rank.compute(int)
        if rank.rank == 0:
            await trio.to_thread.run_sync(inside.wait)
        await rank.barrier()

    def live() -> None:
        try:
            overlap.run(main, ranks=2, timeout_s=30)
        except BaseException as error:
            failures.append(error)

    run_threads(threading.Thread(target=live) for _ in range(2))
    assert failures == []
    assert settings() == before
