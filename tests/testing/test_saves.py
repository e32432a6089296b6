"""Checkpoints that PyTorch saves in a thread of its own while its rank goes on."""

from pathlib import Path

import pytest

from overlap.testing import Ranks

pytest.importorskip("torch", reason="torch is not installed")

HERE = Path(__file__).parent / "programs"


@pytest.mark.slow
def test_a_checkpoint_is_saved_beside_the_program_by_a_group_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Ranks(HERE).program("saves_beside.py", ["own"], ranks=3, seeds=6, real_timeout_s=30)
    assert run.restores("saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_save_that_shares_the_groups_of_the_program_is_found_in_another_order() -> None:
    run = Ranks(HERE).program("saves_beside.py", ranks=2, check=False, real_timeout_s=30)
    assert run.verdict.kind == "skipped"
    assert "saves_beside.py:13" in str(run.verdict)  # the line of async_save, whose thread communicates
