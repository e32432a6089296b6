import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.style import Style

from overlap.errors import UsageError
from overlap.timeline import Recorder, Timeline, TimelineView
from overlap.timeline.draw.axis import ruler_line, tick_step_ns
from overlap.timeline.draw.lanes import (
    Canvas,
    _paint_units,
    draw_half_block_row,
    draw_lanes,
    draw_stream_lane,
    find_coverage,
)
from overlap.timeline.draw.theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from overlap.timeline.measure.activity import Activity
from overlap.timeline.measure.intervals import intersect, merge
from overlap.timeline.measure.steps import rank_windows
from overlap.units import axis_unit
from tests.timeline.made import render_text

GOLDEN = Path(__file__).parent / "golden"


def text_of(pieces):
    return "".join(text for text, _ in pieces)


def cover_of(compute, comm, length=None):
    recorder = Recorder(0)
    for start, end in compute:
        recorder.append(("compute", "compute", "f", start, end, None))
    for start, end in comm:
        recorder.append(("comm", "comm", "all_reduce", start, end, None))
    if length:
        recorder.append(("step", "step", "step 0", 0, length, 0))
    timeline = Timeline.collect([recorder], world_size=1)
    (window,) = windows = rank_windows(timeline)
    return find_coverage(Activity(timeline, windows), window)


@pytest.mark.parametrize("width", [40, 80, 120, 300])
@pytest.mark.parametrize("charset", ["utf8", "ascii"])
def test_golden_text(training, width, charset):
    drawn = render_text(training(3), width=width, ascii=charset == "ascii", step=1)
    assert drawn == (GOLDEN / f"step_{width}_{charset}.txt").read_text(encoding="utf-8")
    assert max(map(len, drawn.splitlines())) <= width
    assert drawn.isascii() == (charset == "ascii")


@pytest.mark.parametrize("charset", ["utf8", "ascii"])
def test_more_than_sixteen_ranks_get_one_row_each(training, charset):
    drawn = render_text(training(17), ascii=charset == "ascii", step=1, all=True)
    assert drawn == (GOLDEN / f"dense_80_{charset}.txt").read_text(encoding="utf-8")


def test_edges_are_eighths_of_a_cell():
    cover = cover_of([(0, 11), (21, 24)], [(11, 15), (20, 24), (30, 32)])
    compute, comm = draw_lanes(cover, Canvas((0, 32), 4, color=False))
    assert (text_of(compute), text_of(comm)) == ("█▍▐ ", " ▐▕▕")
    compute, comm = draw_lanes(cover, Canvas((0, 32), 4, color=True))
    assert compute == [("█▍", COMPUTE), ("▋", f"reverse {COMPUTE}"), (" ", "")]


def test_hidden_communication_is_low_and_exposed_is_full_height():
    cover = cover_of([(0, 24)], [(4, 20), (24, 40)])
    assert text_of(draw_lanes(cover, Canvas((0, 40), 5, color=False))[1]) == "▗▄▖██"
    assert draw_lanes(cover, Canvas((0, 40), 5, color=True))[1] == [("▗▄▖", HIDDEN), ("██", EXPOSED)]


def test_an_edge_between_hidden_and_exposed_shows_both_colours():
    left, right = cover_of([(0, 3)], [(0, 8)]), cover_of([(3, 8)], [(0, 8)])
    assert draw_lanes(left, Canvas((0, 8), 1, color=True))[1] == [("▍", f"{HIDDEN} on {EXPOSED}")]
    assert draw_lanes(right, Canvas((0, 8), 1, color=True))[1] == [("▍", f"{EXPOSED} on {HIDDEN}")]


def test_one_row_has_compute_above_and_communication_below():
    cover = cover_of([(0, 2), (4, 5)], [(1, 4)])
    assert text_of(draw_half_block_row(cover, Canvas((0, 6), 6, color=False))) == "▀█▄▄▀ "
    assert draw_half_block_row(cover, Canvas((0, 6), 6, color=True)) == [
        ("▀", COMPUTE),
        ("▀", f"{COMPUTE} on {HIDDEN}"),
        ("▄▄", EXPOSED),
        ("▀", COMPUTE),
        (" ", ""),
    ]
    assert text_of(draw_half_block_row(cover, Canvas((0, 6), 2, color=False))) == "█▞"
    assert text_of(draw_half_block_row(cover, Canvas((0, 6), 6, ascii=True))) == "#=!!#."


def test_ascii_lanes():
    compute, comm = draw_lanes(cover_of([(0, 2), (4, 5)], [(1, 4)]), Canvas((0, 6), 6, ascii=True))
    assert (text_of(compute), text_of(comm)) == ("##..#.", ".=!!..")


pairs = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


@given(pairs, pairs, st.integers(1, 30))
def test_no_interval_vanishes(compute, comm, cells):
    cover = cover_of([*compute, (10**6, 10**6 + 1)], comm, length=10**6 + 9)
    window = cover.window
    lanes = draw_lanes(cover, Canvas(window, cells, color=False))
    rows = draw_lanes(cover, Canvas(window, cells, ascii=True))
    for start, _ in cover.compute:
        cell = min(round_half_up(start - window[0], window, cells * 8) // 8, cells - 1)
        assert text_of(lanes[0])[cell] != " "
        assert text_of(rows[0])[min(round_half_up(start - window[0], window, cells), cells - 1)] == "#"
    for start, _ in [*cover.waiting, *cover.wire]:
        cell = min(round_half_up(start - window[0], window, cells * 8) // 8, cells - 1)
        assert text_of(lanes[1])[cell] in "▏▎▍▌▋▊▉█▐▕"
        assert text_of(rows[1])[min(round_half_up(start - window[0], window, cells), cells - 1)] == "!"
    assert [len(text_of(lane)) for lane in (*lanes, *rows)] == [cells] * 4


def round_half_up(offset, window, units):
    return int(offset * units / (window[1] - window[0]) + 0.5)


def relative_luminance(colour):
    """WCAG 2.1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_compute_and_hidden_communication_differ_in_grey():
    assert relative_luminance(HIDDEN) / relative_luminance(COMPUTE) >= 2


def printed(view, *, encoding="utf-8", environ=None, **arguments):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    Console(file=out, _environ=environ or {}, **arguments).print(view)
    out.flush()
    return raw.getvalue().decode(encoding)


def stripped(text):
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def test_a_pipe_gets_plain_text_at_80_columns(training):
    shown = printed(TimelineView(training(3), step=1))
    assert stripped(shown) == (GOLDEN / "step_80_utf8.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "charset"),
    [
        ({"encoding": "ascii"}, "ascii"),
        ({"environ": {"TERM": "dumb"}, "force_terminal": True}, "ascii"),
        ({"environ": {"NO_COLOR": "1", "TERM": "xterm"}, "force_terminal": True}, "utf8"),
    ],
)
def test_poor_terminals_get_what_they_can_show(training, arguments, charset):
    shown = printed(TimelineView(training(3), step=1), width=80, height=60, **arguments)
    assert stripped(shown) == (GOLDEN / f"step_80_{charset}.txt").read_text(encoding="utf-8")


def test_a_terminal_gets_colour(training, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    few = {"environ": {"TERM": "xterm-256color"}, "force_terminal": True}
    printed(TimelineView(training(3), step=1), width=80, height=60, **few)  # whose colours are not those of others
    for cached in (Style.parse, Style._add):  # rich shows a style as it first did
        cached.cache_clear()
    arguments = {"environ": {"TERM": "xterm", "COLORTERM": "truecolor"}, "force_terminal": True}
    shown = printed(TimelineView(training(3), step=1), width=80, height=60, **arguments)
    assert re.sub(r"\x1b\[[\d;]*m", "", stripped(shown)) == render_text(training(3), step=1, color=True)
    assert "\x1b[38;2;0;114;178m█" in shown
    assert "\x1b[38;2;213;94;0m█" in shown


@pytest.mark.parametrize("height", [24, 50])
def test_a_screen_shows_who_is_late_and_folds_who_is_alike(training, height):
    drawn = render_text(uneven(training, 64), width=80, height=height, step=1)
    assert drawn == (GOLDEN / f"folded_80x{height}.txt").read_text(encoding="utf-8")
    assert len(drawn.splitlines()) + 2 <= height  # what the command says before, and the prompt


def uneven(training, ranks):
    """The last rank is late; the others compute longer, the higher they are."""
    timeline = training(ranks, late_ns=4_000_000)
    longer = [
        replace(span, end_ns=span.end_ns + 10_000 * span.rank)
        if span.name == "backward 3" and span.rank < ranks - 1
        else span
        for span in timeline.spans
    ]
    return replace(timeline, spans=longer)


def test_equal_ranks_are_one_row(training):
    lines = render_text(training(128, late_ns=0), step=1).splitlines()
    assert lines[0] == "step 1: 128 of 128 ranks; ranks in one row are equal"
    assert [line.split("│")[0].rstrip() for line in lines[1:3]] == ["128 like 63 compute", "            comm"]


def test_ranks_that_are_asked_for_have_rows_of_their_own(training):
    lines = TimelineView(training(100), step=1, ranks=range(20, 60)).lines(height=30, ascii=True)
    assert text_of(lines[0]) == "step 1: 40 of 100 ranks"
    assert sum(text_of(line).endswith("|") for line in lines) == 40


def test_streams_have_lanes_of_their_own():
    recorder = Recorder(0)
    recorder.append(("compute", "compute", "f", 0, 40, None))
    recorder.append(("comm", "tp", "all_gather", 10, 30, None))
    recorder.append(("comm", "gradients", "all_reduce", 20, 80, None))
    lines = render_text(Timeline.collect([recorder], world_size=1), width=40, ascii=True).splitlines()
    assert [line.partition("|")[0].rstrip() for line in lines[1:4]] == ["0 compute", "  gradients", "  tp"]
    assert lines[2] == "  gradients |.......======!!!!!!!!!!!!!|"
    assert lines[3] == "  tp        |...=======................|"


def test_waiting_differs_from_bytes_and_is_named_where_there_is_room():
    recorders = [Recorder(0), Recorder(1)]
    for recorder, start in zip(recorders, (10, 90), strict=True):
        recorder.append(("compute", "compute", "f", 0, start, None))
        info = (("all_reduce", "ring", ("world", (0, 1)), 0, 8, "int8", 90), start, 0, "train.py:3", 0, None)
        recorder.append(("comm", "comm", "all_reduce", start, 100, info))
    timeline = Timeline.collect(recorders, world_size=2)
    text = render_text(timeline, ascii=True)
    assert "|.......~~~~~~~~~~~~~~~~~~ waits for rank 1 ~~~~~~~~~~~~~~~~~~!!!!!!!|" in text
    assert "|...~~ waits for rank 1 ~~!!!|" in render_text(timeline, ascii=True, width=40)
    view = TimelineView(timeline).lines(color=True)
    waiting = [piece for line in view for piece in line if piece[1] == WAITING]
    assert "".join(text for text, _ in waiting).count("░") > 10


def test_a_stream_shows_only_what_is_its_own():
    cover = cover_of([], [(0, 40)])
    assert text_of(draw_stream_lane(merge([(8, 16)]), cover, Canvas((0, 40), 5))) == " █   "


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
    st.tuples(st.integers(0, 60), st.integers(1, 60)),
    st.integers(1, 30),
    st.sampled_from([1, 10**15 + 1]),
)
def test_an_interval_paints_the_units_between_the_nearest_edges(pairs, window, units, scale):
    (low, length), busy = window, merge((start * scale, end * scale) for start, end in pairs)
    low, length = low * scale, length * scale
    cover = replace(cover_of([(0, 1)], []), compute=intersect(busy, merge([(low, low + length)])))
    row = bytearray(units)
    for start, end in cover.compute:
        first = min(((start - low) * units * 2 + length) // (2 * length), units - 1)
        last = max(((end - low) * units * 2 + length) // (2 * length), first + 1)
        row[first:last] = bytes([2]) * (last - first)
    assert _paint_units((low, low + length), units, cover.kept, cover.compute) == bytes(row)


def test_the_height_counts_on_a_terminal_only(training):
    view = TimelineView(uneven(training, 60), step=1)
    arguments = {"environ": {"TERM": "xterm", "NO_COLOR": "1"}, "force_terminal": True}
    assert printed(view, width=80, height=20, **arguments).count("│") == 2 * 2 * 2
    assert printed(view, width=80, height=20).count("│") > 2 * 2 * 2


def test_the_title_tells_the_clock_and_what_was_lost(training):
    timeline = training(2, clock="virtual")
    timeline.dropped = 5
    first = render_text(timeline).splitlines()[0]
    assert first == "whole run: 2 of 2 ranks, virtual time, 5 older spans not kept"


def test_a_run_of_no_length_is_drawn():
    recorder = Recorder(0)
    recorder.append(("compute", "compute", "f", 7, 7, None))
    assert "0 ns" in render_text(Timeline.collect([recorder], world_size=1))


def test_an_unknown_step_is_refused_before_drawing(training):
    with pytest.raises(UsageError, match="nobody recorded step 9"):
        TimelineView(training(1), step=9)


def test_units_and_ticks():
    assert [axis_unit(length) for length in (0, 999, 1000, 10**6, 10**10)] == [
        ("ns", 1),
        ("ns", 1),
        ("us", 1000),
        ("ms", 10**6),
        ("s", 10**9),
    ]
    assert [tick_step_ns(length, 60) for length in (5, 6, 30, 100, 101, 51_000)] == [1, 2, 10, 20, 50, 20_000]
    assert ruler_line(100, 60, mark="|") == "|0 ns       |20 ns      |40 ns      |60 ns      |80 ns"
    assert ruler_line(82, 60, mark="|") == "|0 ns         |20 ns         |40 ns        |60 ns         |"
