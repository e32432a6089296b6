import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])


def python(folder, *words):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "OVERLAP_"))}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_project_trains_and_passes_its_tests(overlap):
    Path("pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--of-a-plugin-that-is-missing"')
    code, out, err = overlap("new", "first")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "next: cd first; python train.py"
    assert sorted(path.name for path in Path("first").rglob("*") if path.is_file()) == [
        "README.md",
        "pytest.ini",
        "test_train.py",
        "tests.yml",
        "train.py",
    ]
    assert python("first", "train.py").splitlines()[-1].startswith("step 50: loss 0.0")
    assert "2 passed" in python("first", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly")


@pytest.mark.slow
def test_a_project_of_pytorch_passes_its_test(overlap):
    pytest.importorskip("torch", reason="torch is not installed")
    assert overlap("new", "first", "--torch")[0] == 0
    assert "1 passed" in python("first", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly")


@pytest.mark.parametrize("kind", [[], ["--torch"]])
def test_nothing_is_left_to_fill_in(overlap, kind):
    overlap("new", "first", *kind)
    for path in Path("first").rglob("*"):
        assert path.is_dir() or ("{{name}}" not in path.read_text() and "{{source}}" not in path.read_text())
    assert Path("first", "README.md").read_text().startswith("# first\n")
    assert (
        f'"overlap{"[torch]" * bool(kind)} @ ${{{{ vars.SOURCE' in Path("first/.github/workflows/tests.yml").read_text()
    )


def test_a_folder_that_exists_stays_as_it_is(overlap):
    Path("first").mkdir()
    Path("first", "mine.py").touch()
    code, _, err = overlap("new", "first")
    assert (code, err) == (2, "overlap: NAME: first exists already; choose another name\n")
    assert os.listdir("first") == ["mine.py"]


@pytest.mark.parametrize("name", ["", ".", "a/b/c"])
def test_a_name_that_is_none_is_refused_and_nothing_is_left(overlap, name):
    code, _, err = overlap("new", name)
    assert code == 2
    assert err.startswith("overlap: NAME: ")
    assert os.listdir() == []


def test_a_folder_that_cannot_be_written_is_left_alone(overlap):
    Path("full").mkdir()
    os.chmod("full", stat.S_IRUSR | stat.S_IXUSR)
    if os.access("full", os.W_OK):
        Path("full").rmdir()
        Path("full").touch()  # the superuser may write everywhere, but not into a file
    code, _, err = overlap("new", "full/first")
    assert (code, err.startswith("overlap: NAME: full/first cannot be made: ")) == (2, True)


def test_an_unknown_template_is_told_with_the_right_one(overlap):
    assert "did you mean --torch?" in overlap("new", "first", "--toch")[2]
