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
    run = Ranks(HERE).program("saves_beside.py", ranks=3, seed=0, check=False, real_timeout_s=30)
    runs = [run, *(Ranks(HERE).program("saves_beside.py", ranks=3, seed=n, check=False) for n in range(1, 9))]
    kinds = {str(each.verdict.kind) for each in runs if each.verdict is not None}
    assert kinds == {"mismatch"}
    first = next(each.verdict for each in runs if each.verdict is not None)
    assert "saves_beside.py:12" in str(first)
