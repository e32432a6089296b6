"""Where `ulimit -v` leaves no memory for a report, one line says so."""

import pytest

import overlap
from overlap import cli, uncaught

LINE = "overlap: out of memory: allow each process more (ulimit -v), or start fewer ranks"


def refuse(*_):
    raise MemoryError


def test_a_command_that_cannot_be_loaded_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "import_module", refuse)
    assert cli.main(["plan"]) == 1
    assert capsys.readouterr().err == f"{LINE} (MemoryError: )\n"


def test_memory_that_our_own_code_lacks_is_reported_without_its_frames(monkeypatch, capsys):
    monkeypatch.setattr("overlap.front.resolve_config", refuse)
    with pytest.raises(MemoryError) as caught:
        overlap.run(lambda rank: None, ranks=2)
    uncaught._show_error(MemoryError, caught.value, caught.tb)
    err = capsys.readouterr().err
    assert "front.py" not in err
    assert "MemoryError" in err
    monkeypatch.setattr(uncaught, "_report_ours", refuse)
    uncaught._show_error(MemoryError, caught.value, caught.tb)
    assert capsys.readouterr().err == f"{LINE} (MemoryError: )\n"
