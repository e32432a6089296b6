import os

import pytest

from tests.benchmarks.__main__ import main


@pytest.fixture
def benchmarks(capsys, monkeypatch, tmp_path):
    """Return a function that runs the command in this process, in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("OVERLAP_")]:
        monkeypatch.delenv(name)

    def run(*argv):
        code = main(argv)
        return code, *capsys.readouterr()

    return run
