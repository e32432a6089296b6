"""Pictures: the same rows and numbers as in the terminal, as boxes; and the files that hold them."""

import argparse
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from overlap.cli.timeline import fill, main
from overlap.errors import UsageError
from overlap.timeline import Span, TimelineView, write_trace
from overlap.timeline.draw.picture import scene_of, svg
from overlap.timeline.draw.theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from tests.timeline.made import comm, compute, timeline_of

LEFT, PIXELS = 92, 896  # of the axis: a label of one letter, and 1,000 pixels in all


def view():
    """Rank 1 is late by 20 us; rank 0 waits, and then hides half of a transfer."""
    return TimelineView(
        timeline_of(
            compute(0, 0, 10_000), compute(1, 0, 30_000, "tokenise"),
            comm(0, 10_000, 30_000, 50_000, ranks=(0, 1)), comm(1, 30_000, 30_000, 50_000, ranks=(0, 1)),
            compute(0, 40_000, 50_000), compute(1, 40_000, 50_000),
        )
    )  # fmt: skip


def boxes(scene, colour):
    """From where to where boxes of a colour go, in microseconds, above the legend; by row."""
    legend = max(box.y for box in scene.boxes if box.width > 1)
    found = {}
    for box in scene.boxes:
        if box.colour == colour and box.y + box.height < legend:
            ends = [round((x - LEFT) * 50 / PIXELS) for x in (box.x, box.x + box.width)]
            found.setdefault(box.y, []).append(ends)
    return [found[y] for y in sorted(found)]


def test_boxes_are_the_intervals_and_who_is_waited_for_is_first():
    scene = scene_of(view())
    assert boxes(scene, COMPUTE) == [[[0, 30], [40, 50]], [[0, 10], [40, 50]]]
    assert boxes(scene, WAITING) == [[[10, 30]]]
    assert boxes(scene, EXPOSED) == [[[30, 40]], [[30, 40]]]
    assert boxes(scene, HIDDEN) == [[[40, 50]], [[40, 50]]]
    assert {box.stripes for box in scene.boxes if box.colour == WAITING} == {"upright"}
    texts = [label.text for label in scene.labels]
    assert texts[:5] == ["whole run: 2 of 3 ranks; who is waited for most is first", "1", "compute", "comm", "0"]
    assert "for 1" in texts
    assert {"0 us", "10 us", "40 us", "compute", "hidden comm", "waiting for a rank", "on the wire"} <= set(texts)
    assert " ".join(texts).endswith(str(view().verdict))


def kept(rank, start, end):
    return Span(rank=rank, kind="program", lane="program", name="train.py:50", start_ns=start, end_ns=end)


def test_a_kept_event_loop_has_level_stripes_and_an_entry_in_the_legend():
    assert "event loop kept" not in {label.text for label in scene_of(view()).labels}
    scene = scene_of(
        TimelineView(timeline_of(compute(0, 0, 10_000), kept(0, 10_000, 40_000), compute(0, 40_000, 50_000)))
    )
    assert boxes(scene, COMPUTE) == [[[0, 10], [40, 50]]]
    assert boxes(scene, WAITING) == [[[10, 40]]]
    assert [box.stripes for box in scene.boxes if box.colour == WAITING] == ["level", "level", "upright"]  # two of them
    assert "event loop kept" in {label.text for label in scene.labels}  # are the legend's
    assert svg(scene).count('fill="url(#level)"') == 2


def test_each_line_of_text_has_a_line_of_its_own():
    at_the_edge = [(label.y, label.text.split()[0]) for label in scene_of(view(), width=300).labels if label.x == 12]
    assert at_the_edge == [
        (25, "whole"), (43, "waited"), (73, "1"), (113, "0"),
        (234, "whole"), (252, "exposed"), (270, "for"), (288, "train.py:1),"), (306, "(all_reduce"), (324, "33%"),
    ]  # fmt: skip


def test_everything_is_inside_and_no_interval_vanishes():
    spans = [compute(0, at, at + 1) for at in range(0, 10_000_000, 1_000_000)]
    scene = scene_of(TimelineView(timeline_of(*spans)), width=300)
    assert len([box for box in scene.boxes if box.colour == COMPUTE]) == len(spans) + 1  # and the legend's
    for box in scene.boxes:
        assert 0 <= box.x < box.x + box.width <= scene.width
        assert 0 <= box.y < box.y + box.height <= scene.height
    assert all(
        label.x + 8 * len(label.text) <= scene.width + 8 and 0 < label.y < scene.height for label in scene.labels
    )


def test_svg_stands_alone():
    text = svg(scene_of(view()))
    assert text == svg(scene_of(view()))
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    root = ET.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{name}title").text.endswith(str(view().verdict))
    shown = [rect for rect in root.iter(f"{name}rect") if rect.get("fill") == EXPOSED]
    assert [int(rect.get("width")) for rect in shown[:2]] == [PIXELS // 5, PIXELS // 5]
    assert "&lt;" in svg(scene_of(TimelineView(timeline_of(compute(0, 0, 9), comm(0, 9, 9, 99, op="<x>")))))


def test_what_xml_has_no_place_for_is_escaped():
    scene = replace(scene_of(view()), title="a\x07\x1b[31m<b>")
    assert ET.fromstring(svg(scene)).findtext("{*}title") == r"a\x07\x1b[31m<b>"


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
