"""Programs of PyTorch in folders of their own: working directories, modules, and bugs that are not the program's."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overlap.errors import UsageError
from overlap.testing import Ranks, RanksFailed, running, views
from overlap.testing.folders import RunFolder
from overlap.testing.judging import judge_run
from overlap.testing.record import Record, Verdict
from overlap.testing.run import Run
from overlap.testing.running import Setting

HERE = Path(__file__).parent / "programs"


def test_a_run_finds_what_was_in_the_current_folder_and_changes_nothing_there(tmp_path, monkeypatch) -> None:
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    (work / "data" / "a.txt").write_text("a")
    (work / "long").write_bytes(bytes((1 << 20) + 1))
    (work / "venv").mkdir()
    (work / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "next.txt").write_text("next")
    monkeypatch.chdir(work)
    run = RunFolder()
    assert sorted(path.name for path in run.path.iterdir()) == ["data", "long", "venv"]
    assert (run.path / "long").is_symlink()
    assert (run.path / "venv").is_symlink()
    assert (run.path / ".." / "next.txt").read_text() == "next"
    (run.path / "data" / "a.txt").write_text("b")
    (run.path / "new.txt").touch()
    assert (work / "data" / "a.txt").read_text() == "a"
    assert not (work / "new.txt").exists()
    path = run.path
    del run
    assert not path.exists()
    assert (work / "venv" / "pyvenv.cfg").exists()


def test_folders_with_many_entries_are_links(tmp_path, monkeypatch) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for number in range(1001):
        (many / str(number)).touch()
    monkeypatch.chdir(tmp_path)
    assert (RunFolder().path / "many").is_symlink()


@pytest.mark.slow
def test_a_checkpoint_that_is_read_without_a_barrier_is_found(tmp_path, monkeypatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.chdir(tmp_path)
    run = Ranks(HERE).program("early_load.py", ranks=3)
    assert run.restores("model.pt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RanksFailed, match=r"failed at early_load\.py:\d+: FileNotFoundError: .*'model\.pt'"):
        Ranks(HERE).program("early_load.py", ranks=3, seeds=30)


INSTALLED = """
import own
import installed_marks
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
own.ranks.append(dist.get_rank())
installed_marks.ranks.append(dist.get_rank())
assert own.ranks == [dist.get_rank()]
print(len(installed_marks.ranks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["env", "env/lib/site-packages"])
def test_modules_of_virtual_environments_are_loaded_once(folder, tmp_path, monkeypatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    modules = tmp_path / folder
    modules.mkdir(parents=True)
    if folder == "env":
        (modules / "pyvenv.cfg").touch()
    (modules / "installed_marks.py").write_text("ranks = []")
    (tmp_path / "own.py").write_text("ranks = []")
    (tmp_path / "train.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(modules))
    sys.modules.pop("installed_marks", None)
    assert sorted(Ranks(tmp_path).program("train.py", ranks=2).output) == ["1\n", "2\n"]


def failing(setting: Setting) -> Run:
    verdict = Verdict(kind="crash", text="as planned", ranks=(0,), lines=("train.py:1",))
    return Run(size=setting.ranks or 2, record=Record(size=setting.ranks or 2), seed=setting.seed, verdicts=[verdict])


@pytest.mark.parametrize(("error", "raised"), [(KeyError("ours"), KeyError), (UsageError("refused"), RanksFailed)])
def test_errors_of_ours_are_raised_where_a_failure_is_made_smaller(error, raised) -> None:
    def make(setting: Setting) -> Run:
        if setting.ranks != 8:
            raise error
        return failing(setting)

    with pytest.raises(raised):
        running.try_seeds(make, running.Trials(setting=Setting(ranks=8), seeds=2))


def test_an_error_that_no_rank_has_raised_is_no_failure_of_the_program() -> None:
    with pytest.raises(ZeroDivisionError, match="ours"):
        judge_run(Record(size=2), ZeroDivisionError("ours"))


def writes_while_ranks_take_turns(moves: bool) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    over = threading.Event()
    folder = Path(f"of {dist.get_rank()}")
    folder.mkdir()
    if moves:
        os.chdir(folder)
        folder = Path()

    def write() -> None:
        while not over.is_set():
            (folder / "file").touch()

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(50):
        dist.barrier()
    over.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in the run's", "of one for all", "in the rank's"])
def test_threads_of_ranks_write_to_the_folder_of_the_run(tmp_path, monkeypatch, how) -> None:
    """Also where threads cannot have folders of their own; where they can, each to that of its rank."""
    pytest.importorskip("torch", reason="torch is not installed")
    if how == "of one for all":
        monkeypatch.setattr(views, "_separate_working_folder", lambda: False)
    elif how == "in the rank's" and not can_have_own_folder():
        pytest.skip("threads of this machine have one folder")
    monkeypatch.chdir(tmp_path)
    run = Ranks().function(writes_while_ranks_take_turns, how == "in the rank's", ranks=3)
    assert not list(tmp_path.iterdir())
    assert sorted(path.name for path in run.folder.path.iterdir()) == ["of 0", "of 1", "of 2"]


def can_have_own_folder() -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(views._separate_working_folder).result()
