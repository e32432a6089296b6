"""What becomes of the one trace file of all processes when one of them is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap.launch import Membership
from overlap.launch.traces import write_together
from overlap.timeline import Recorder, Timeline, read_trace

from .company import meet


@pytest.mark.parametrize("members", [1, 2])
def test_whoever_cannot_write_the_trace_of_all_says_where_its_own_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], members: int
) -> None:
    path = tmp_path / "t.json"

    async def main(membership: Membership) -> None:
        if membership.member == 0:
            await write_together(Timeline.collect([Recorder(0)], world_size=members), path, membership)

    meet(members, main)
    own = path if members == 1 else tmp_path / "t-process0.json"
    assert list(tmp_path.iterdir()) == [own]
    assert read_trace(own).world_size == members
    lost = f"overlap: no {path}, for not all processes could give their timelines; that of this one is in {own}\n"
    assert capsys.readouterr().err == ("" if members == 1 else lost)
