"""SVG of a timeline: the characters and colours of the terminal, in a file that stands alone."""

import argparse
import re
import xml.etree.ElementTree as ET

import pytest

from overlap.cli.timeline import fill, main
from overlap.errors import UsageError
from overlap.timeline import Span, TimelineView, write_trace
from overlap.timeline.draw.picture import svg
from overlap.timeline.draw.theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from tests.timeline.made import comm, compute, render_text, timeline_of

NAME = "{http://www.w3.org/2000/svg}"


def late():
    """Rank 1 is late by 20 us; rank 0 waits, and then hides half of a transfer."""
    return timeline_of(
        compute(0, 0, 10_000), compute(1, 0, 30_000, "tokenise"),
        comm(0, 10_000, 30_000, 50_000, ranks=(0, 1)), comm(1, 30_000, 30_000, 50_000, ranks=(0, 1)),
        compute(0, 40_000, 50_000), compute(1, 40_000, 50_000),
    )  # fmt: skip


def rows_of(text):
    """The lines of a picture: pieces of text put together from left to right, by height."""
    lines = {}
    for piece in ET.fromstring(text).iter(f"{NAME}text"):
        if piece.get("y"):
            lines.setdefault(float(piece.get("y")), []).append((float(piece.get("x")), piece.text))
    return [
        "".join(text for _, text in sorted(line)).replace("\xa0", " ").rstrip() for _, line in sorted(lines.items())
    ]


def colours_of(text):
    return {colour.upper() for colour in re.findall(r"fill: (#\w{6})", text)}


def test_it_is_the_picture_of_the_terminal():
    shown, drawn = (
        [re.sub(r"\s", "", line) for line in lines if line.strip()]
        for lines in (render_text(late(), width=140, color=True).splitlines(), rows_of(svg(TimelineView(late()))))
    )
    assert drawn == shown
    assert any("waitingfor" in line for line in drawn)


def test_each_kind_has_its_colour():
    assert {COMPUTE, HIDDEN, WAITING, EXPOSED} <= colours_of(svg(TimelineView(late())))


def test_a_kept_event_loop_has_an_entry_in_the_legend():
    kept = Span(rank=0, kind="program", lane="program", name="train.py:50", start_ns=10_000, end_ns=40_000)
    text = svg(TimelineView(timeline_of(compute(0, 0, 10_000), kept, compute(0, 40_000, 50_000))))
    assert any("event loop kept" in line for line in rows_of(text))
    assert not any("event loop kept" in line for line in rows_of(svg(TimelineView(late()))))


def test_svg_stands_alone():
    view = TimelineView(late())
    text = svg(view)
    assert text == svg(view)
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@" not in text
    assert ET.fromstring(text).findtext(f"{NAME}title") == str(view.verdict)


def test_what_xml_has_no_place_for_is_escaped():
    view = TimelineView(timeline_of(compute(0, 0, 9), comm(0, 9, 9, 99, op="<x>{0}\x07\x1b[31m")))
    assert r"<x>{0}\x07\x1b[31m" in ET.fromstring(svg(view)).findtext(f"{NAME}title")


@pytest.fixture
def command(tmp_path, training):
    write_trace(training(3), tmp_path / "run.json")
    parser = argparse.ArgumentParser()
    fill(parser)
    return lambda *options: main(parser.parse_args([str(tmp_path / "run.json"), *options]))


def test_the_command_writes_the_picture_beside_its_page(command, tmp_path, capsys):
    assert command("--svg", str(tmp_path / "a.svg")) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    assert "step 1" in capsys.readouterr().out


def test_what_cannot_be_written_is_one_line(command, tmp_path):
    with pytest.raises(UsageError, match=r"^--svg: "):
        command("--svg", str(tmp_path / "nowhere" / "a.svg"))
