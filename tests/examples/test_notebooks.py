"""Notebooks: the example runs as it is; timelines, verdicts and errors draw themselves."""

import os
import subprocess
import sys
from html import escape
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import overlap
from overlap import uncaught
from overlap.timeline import Recorder, Timeline, TimelineView
from tests.errors import error_of

ROOT = Path(__file__).parents[2]

SHOWN = """\
import json, sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=100).execute()
print(json.dumps([output for cell in notebook.cells for output in cell.get("outputs", ())]))
"""


def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason=f"not installed: {module}")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SHOWN, str(ROOT / "examples" / "24_notebook.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    for shown in ("[10, 10]", "<pre", "exposed", "rank 1 failed at", "array([1., 1., 1.])"):
        assert shown in done.stdout
    assert "overlap/runtime" not in done.stdout


async def main(rank: overlap.Rank) -> Recorder:
    with rank.step(0):
        await rank.compute(sum, [1], name="a <b>", seconds=1e-3)
    return rank.recorder


def recorded() -> Timeline:
    return Timeline.collect(overlap.run(main, ranks=2, clock="virtual"), world_size=2, clock="virtual")


def test_a_timeline_draws_its_median_step() -> None:
    timeline = recorded()
    html = timeline._repr_html_()
    assert html.startswith("<pre ")
    assert "compute" in html
    assert "step 0" in html
    assert "color: #" in html
    assert repr(timeline) == "<Timeline of 4 spans, 2 of 2 ranks, virtual>"
    assert Timeline(spans=[], world_size=2)._repr_html_() == "<pre>a timeline without spans</pre>"


TEXT = """\
step 0: 2 of 2 ranks, virtual time; ranks in one row are equal
2 like 0 compute |#############################################################|
         comm    |.............................................................|
                  |0 ms       |0.2 ms     |0.4 ms     |0.6 ms     |0.8 ms
# compute  = hidden comm  ~ waiting for a rank  ! on the wire  . idle

 rank/us  wall  compute  hidden  hid%  wait  wire  idle  spread
2 like 0  1000     1000     0.0   n/a   0.0   0.0   0.0    0.0%

step 1000 us: compute 1000"""


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_of_ipython_draws_a_timeline_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, printed = recorded(), list[str]()
    printer = SimpleNamespace(text=printed.append)  # as IPython's
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    view = TimelineView(timeline, step=0)
    for shown in (timeline, view):
        shown._repr_pretty_(printer, cycle=False)
    assert printed == [repr(timeline), repr(view)]
    for name, value in {"TERM": "dumb", "COLUMNS": "80", "LINES": "25"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    for shown in (timeline, view, empty := Timeline(spans=[], world_size=2)):
        shown._repr_pretty_(printer, cycle=False)
    assert printed[2:] == [TEXT, TEXT, repr(empty)]


def test_a_report_is_text_that_wraps() -> None:
    found = overlap.why(recorded(), step=0)
    assert f">{escape(str(found))}</pre>" in found._repr_html_()


def test_ipython_shows_errors_without_frames_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setattr(overlap.OverlapError, "_render_traceback_", None, raising=False)  # put back afterwards
    uncaught.install_error_hooks()

    async def bad(rank: overlap.Rank) -> None:
        await rank.compute(int, "no number")

    lines = error_of(overlap.RankFailedError, overlap.run, bad, ranks=1)._render_traceback_()  # type: ignore[attr-defined]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("overlap: rank 0 failed at ")
    assert not any("overlap/runtime" in line for line in lines)
