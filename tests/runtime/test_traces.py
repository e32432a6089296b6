"""A trace that cannot be written takes nothing from a run: its results come back, its error is raised."""

import os
from pathlib import Path

import pytest
import trio

import overlap
from overlap.timeline import read_trace
from tests.errors import error_of

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
FULL = "trace: cannot write /dev/full: No space left on device; name another file"


async def well(rank: overlap.Rank) -> int:
    await rank.barrier()
    return rank.rank


async def badly(rank: overlap.Rank) -> None:
    await rank.barrier()
    raise ValueError("no")


def test_results_come_with_a_warning(clock: str) -> None:
    with pytest.warns(overlap.TraceWarning, match=f"^{FULL}$") as warned:
        assert overlap.run(well, ranks=2, clock=clock, trace="/dev/full") == [0, 1]
    assert [one.filename for one in warned] == [__file__]


def test_so_they_do_inside_a_trio_program() -> None:
    async def program() -> list[int]:
        return await overlap.run_async(well, ranks=2, trace="/dev/full")

    with pytest.warns(overlap.TraceWarning, match=f"^{FULL}$") as warned:
        assert trio.run(program) == [0, 1]
    assert [one.filename for one in warned] == [__file__]


def test_the_error_of_the_program_is_raised_with_a_note(clock: str) -> None:
    error = error_of(overlap.RankFailedError, overlap.run, badly, ranks=2, clock=clock, trace="/dev/full")
    assert isinstance(error.__cause__, ValueError)
    assert error.__notes__ == [FULL]


def test_an_interrupt_stays_one(tmp_path: Path) -> None:
    async def stopped(rank: overlap.Rank) -> None:
        raise KeyboardInterrupt

    assert FULL in error_of(KeyboardInterrupt, overlap.run, stopped, ranks=1, trace="/dev/full").__notes__


def test_whatever_goes_wrong_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("overlap.timeline.files.trace.join_parts", broken)
    with pytest.warns(overlap.TraceWarning, match=r"cannot write .*t\.json: MemoryError\(\)$"):
        assert overlap.run(well, ranks=2, trace=tmp_path / "t.json") == [0, 1]


def test_a_trace_of_a_failed_run_is_written(tmp_path: Path) -> None:
    with pytest.raises(overlap.RankFailedError):
        overlap.run(badly, ranks=2, trace=tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json").world_size == 2
