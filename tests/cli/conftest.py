import os
import subprocess
import sys

import pytest

from overlap.cli import main
from tests import interpreters
from tests.interpreters import Python, environment

ROOT = str(interpreters.ROOT)


@pytest.fixture
def overlap(capsys, monkeypatch, tmp_path):
    """Return a function that runs the command line in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in [name for name in os.environ if name.startswith("OVERLAP_")]:
        monkeypatch.delenv(name)

    def run(*argv):
        code = main(list(argv))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def process(tmp_path):
    """Return a function that starts the command as a process of its own, in an empty folder."""

    def start(*argv, stdout=subprocess.PIPE, **variables):
        environ = environment(**variables)
        if "NO_COLOR" not in variables:
            del environ["NO_COLOR"]
        if not any(name.startswith(("PYTHON", "LC_")) for name in variables):
            return Python("-m", "overlap", *argv, cwd=tmp_path, env=environ, stdout=stdout)
        return subprocess.Popen(
            [sys.executable, "-m", "overlap", *argv],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def ran(process):
    """Return a function that runs the command as a process of its own: (exit code, stdout, stderr)."""

    def run(*argv, **variables):
        child = process(*argv, **variables)
        out, err = child.communicate(timeout=60)
        return child.returncode, out, err

    return run


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a file into the folder of the test and returns its name."""

    def write(text, name="train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write
