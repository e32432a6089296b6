"""Completion of the command line in a shell."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from overlap.cli import main


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if find_spec("shtab") is None:
        pytest.skip("not installed: shtab")
    assert main(["--print-completion", "bash"]) == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["overlap", "wh"], {"why"}),
        (["overlap", "run", "--trace-s"], {"--trace-steps"}),
        (["overlap", "run", "--checks"], {"--checksums"}),
        (["overlap", "timeline", "--what"], {"--what-if"}),
        (["overlap", "timeline", "--html", "train"], {"train.py"}),
    ],
)
def test_bash_is_offered_what_may_follow(script: Path, words: list[str], offered: set[str]) -> None:
    (script.parent / "train.py").touch()
    asked = " ".join(words)
    line = f"source {script}; COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; _shtab_overlap; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", line], cwd=script.parent, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == offered, done.stderr


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion=fish"]) == 2
    told = "overlap: --print-completion: expected one of bash, zsh, tcsh, got 'fish'\n"
    assert capsys.readouterr().err == told


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("overlap.cli.completion.find_spec", lambda name: None)
    assert main(["--print-completion", "zsh"]) == 2
    assert capsys.readouterr().err.endswith('shtab is not installed: pip install ".[completion]"\n')
