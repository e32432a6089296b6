"""The browser: what moves do, what is said of a span, and the whole of it on a screen of 80 x 24, driven by keys."""

import argparse
import asyncio
import sys

import pytest

from overlap.cli.timeline import browser, fill, main
from overlap.cli.timeline.browser.cursor import Cursor
from overlap.cli.timeline.browser.track import Track, details
from overlap.errors import UsageError
from overlap.timeline import write_trace
from tests.timeline.made import comm, compute, timeline_of
from tests.timeline.programs import data_parallel, run


def two_ranks(origin=5_000):
    """Rank 1 computes 20 us more, and rank 0 waits for it; then one all-reduce is hidden and one is not."""
    at = lambda *times: [origin + time for time in times]  # noqa: E731
    return timeline_of(
        compute(0, *at(0, 10_000)), compute(1, *at(0, 10_000)), compute(1, *at(10_000, 30_000), "tokenise"),
        comm(0, *at(10_000, 30_000, 40_000), ranks=(0, 1)), comm(1, *at(30_000, 30_000, 40_000), ranks=(0, 1)),
        compute(0, *at(50_000, 60_000), "late"), comm(0, *at(50_000, 50_000, 55_000), seq=1, ranks=(0, 1)),
        comm(1, *at(50_000, 50_000, 55_000), seq=1, ranks=(0, 1)),
    )  # fmt: skip


@pytest.fixture
def cursor():
    return Cursor([Track(two_ranks(), title="this")])


def place(cursor):
    return cursor.lane.rank, cursor.lane.name, cursor.at_ns


def test_lanes_are_those_of_each_rank_compute_first(cursor):
    assert [(lane.rank, lane.name) for lane in cursor.track.lanes] == [
        (0, "compute"), (0, "comm"), (1, "compute"), (1, "comm"),
    ]  # fmt: skip


def test_moves_stay_inside_and_the_window_follows(cursor):
    assert (cursor.window, cursor.cell_ns(60)) == ((0, 60_000), 1_000)
    cursor.move(3, of=60)
    cursor.change_lane(9)
    assert place(cursor) == (1, "comm", 3_000)
    cursor.move(-9, of=60)
    cursor.change_lane(-9)
    assert place(cursor) == (0, "compute", 0)
    cursor.zoom(0.25)
    assert cursor.window == (0, 15_000)
    cursor.move(80, of=60)
    assert (cursor.at_ns, cursor.window) == (20_000, (8_750, 23_750))
    cursor.zoom(100)
    assert cursor.window == (0, 60_000)
    cursor.move(1e9, of=60)
    assert cursor.at_ns == 59_999


def test_zooming_keeps_the_cursor_where_it_is_on_the_screen(cursor):
    cursor.move(30, of=60)
    cursor.zoom(0.5)
    assert cursor.window == (15_000, 45_000)
    cursor.zoom(1e-9)
    assert cursor.window[1] - cursor.window[0] == 20


def test_jumps_go_to_what_waits_and_to_what_is_exposed_and_say_when_there_is_nothing(cursor):
    cursor.next_waiting(1)
    assert place(cursor) == (0, "comm", 10_000)
    cursor.next_waiting(1)
    assert (place(cursor), cursor.said) == ((0, "comm", 10_000), "nothing waits after this")
    cursor.next_exposed(1)
    assert place(cursor) == (1, "comm", 30_000)  # the second of rank 0 is hidden
    cursor.next_exposed(1)
    assert place(cursor) == (1, "comm", 50_000)
    cursor.next_exposed(-1)
    assert place(cursor) == (1, "comm", 30_000)


def test_the_next_span_of_a_lane(cursor):
    cursor.next_span(1)
    assert place(cursor) == (0, "compute", 50_000)
    cursor.next_span(1)
    assert cursor.said == "no further span in this lane after this"
    cursor.next_span(-1)
    assert (place(cursor), cursor.said) == ((0, "compute", 0), "")


def test_a_search_goes_round_and_round(cursor):
    cursor.next_match(1)
    assert cursor.said == "search first: /"
    cursor.search("TRAIN.PY:9")
    assert (place(cursor), cursor.said) == ((0, "comm", 10_000), "'TRAIN.PY:9': 1 of 4")
    cursor.next_match(-1)
    assert (place(cursor), cursor.said) == ((1, "comm", 50_000), "'TRAIN.PY:9': 4 of 4")
    cursor.next_match(1)
    assert cursor.said == "'TRAIN.PY:9': 1 of 4"
    cursor.search("nowhere")
    assert cursor.said == "nothing is called 'nowhere'"


def said(cursor):
    return details(cursor.track, cursor.lane, cursor.at_ns, cursor.under(60))


def test_details_say_where_the_time_of_an_operation_went(cursor):
    cursor.next_waiting(1)
    assert said(cursor) == [
        "rank 0 comm at 10.000 us: all_reduce, 30 us from 10.000 us",
        "all_reduce #0 on world of 2 ranks, 8 B float32, priority 0 at train.py:9",
        "queued 0 ns; waited 20 us for rank 1 (compute 'tokenise' at train.py:1)",
        "moved bytes for 10 us: algbw 0.0008 GB/s, busbw 0.0008 GB/s",
        "exposed 30 us: waiting 20 us, on the wire 10 us",
        "ring",
    ]
    cursor.next_span(1)
    assert said(cursor)[4] == "hidden: its rank computed all the time"
    cursor.change_lane(-1)
    cursor.move(-15, of=60)
    assert said(cursor) == ["rank 0 compute at 35.000 us: nothing"]
    cursor.next_span(-1)
    assert said(cursor) == ["rank 0 compute at 0 ns: work, 10 us from 0 ns", "called at train.py:1"]


def test_details_say_what_the_planner_thinks_of_the_algorithm():
    timeline = run(data_parallel(mib=16), algorithm="ring")
    cursor = Cursor([Track(timeline, title="this")])
    cursor.next_exposed(1)
    found = said(cursor)
    assert found[-1] == "ring; the planner's choice is kangaring, in 601 us"
    assert found[3].endswith("; predicted 664 us alone")
    best = Cursor([Track(run(data_parallel(mib=16)), title="this")])
    best.next_exposed(1)
    assert said(best)[-1].startswith("kangaring, the best here: 10% faster than ring: ")


# -- on a screen -------------------------------------------------------------------------------------------------------


def text_of(strip):
    return "".join(segment.text for segment in strip).rstrip()


def reversed_of(strip):
    """Return what stands on a line in reverse colours."""
    return "".join(segment.text for segment in strip if segment.style and segment.style.reverse)


def screens(tracks, *pressed, size=(80, 24), ascii=False, of=text_of):
    """Press keys, a few at a time, and return the screen after each: `of` each line."""
    pytest.importorskip("textual", reason="not installed: textual")
    from overlap.cli.timeline.browser.app import TimelineApp

    app, seen = TimelineApp(tracks, ascii=ascii), []

    def look():
        strips = app.screen._compositor.render_strips()
        seen.append([of(strip) for strip in strips])

    async def drive():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            look()
            for keys in pressed:
                await pilot.press(*keys)
                await pilot.pause()
                look()

    asyncio.run(drive())
    return seen


def test_a_screen_of_80_by_24():
    (first, jumped, zoomed) = screens([Track(two_ranks(), title="this")], "w", "z")
    assert len(first) == 24
    assert max(map(len, first)) <= 80
    assert first[:8] == [
        "this: whole run 60.0 us: compute 25.0, exposed 22.5 (38%): 10.0 waiting for rank",
        "1 (compute 'tokenise' at train.py:1), 12.5 on the wire (all_reduce at",
        "train.py:9); idle 12.5; hidden 10% of 70% possible",
        "this          ╵0 us                 ╵20 us                ╵40 us",
        "   0 compute │███████████                                            ███████████",
        "   0 comm    │           ░░░░░░░░░░░░░░░░░░░░░░███████████           ▄▄▄▄▄▖",
        "   1 compute │█████████████████████████████████",
        "   1 comm    │                                 ███████████           █████▌",
    ]
    assert first[22:] == [
        "arrows move  +/- zoom  z span  0 all  e/w next exposed/waiting  [/] span",
        "/ search  n/N match  tab other run  pgup/pgdn pan  ? legend  q quit",
    ]
    assert jumped[13] == "rank 0 comm at 10.000 us: all_reduce, 30 us from 10.000 us"
    assert jumped[15] == "queued 0 ns; waited 20 us for rank 1 (compute 'tokenise' at train.py:1)"
    assert zoomed[3].split() == ["this", "╵10", "us", "╵20", "us", "╵30", "us", "╵40", "us"]


@pytest.mark.parametrize(("ascii", "glyph"), [(False, "▒"), (True, "%")])
def test_the_legend_has_all_glyphs(ascii, glyph):
    (_, helped) = screens([Track(two_ranks(), title="this")], ["question_mark"], ascii=ascii)
    assert f"{glyph} event loop kept" in "\n".join(helped)


def test_the_lane_and_the_cell_of_the_cursor_are_marked():
    first, below = screens([Track(two_ranks(), title="this")], ["down", "down"], of=reversed_of)
    assert first[4:8] == ["   0 compute █", "", "", ""]
    assert below[4:8] == ["", "", "   1 compute █", ""]


def test_keys_search_help_and_plain_characters():
    track = Track(two_ranks(), title="this")
    searched, again, helped = screens([track], ["slash", *"ken", "enter"], "n", ["question_mark"], ascii=True)[1:]
    assert searched[13] == "rank 1 compute at 10.000 us: tokenise, 20 us from 10.000 us"
    assert "'ken': 1 of 1" in searched
    assert again == searched
    assert helped[13:15] == [
        "# compute  % event loop kept  = hidden comm  ~ waiting for a rank  ! on the wire",
        ". idle",
    ]
    assert all(line.isascii() for line in helped)


def test_two_runs_above_each_other_share_an_axis():
    tracks = [Track(two_ranks(), title="this"), Track(two_ranks(origin=1_000_000), title="against")]
    first, other = screens(tracks, ["tab", "w"])
    above, below = first[3:8], first[8:13]
    assert below[0] == above[0].replace("this   ", "against")
    assert below[1:] == above[1:]
    assert other[0].startswith("against: whole run 60.0 us")
    assert other[13].startswith("rank 0 comm at 10.000 us: all_reduce")


def test_small_screens_and_many_lanes():
    spans = [compute(rank, 0, 10 + rank) for rank in range(12)]
    first, down = screens([Track(timeline_of(*spans), title="this")], ["down"] * 11, size=(40, 20))
    assert any(line.startswith("   0 compute") for line in first)
    assert any(line.startswith("  11 compute") for line in down)
    assert max(map(len, down)) <= 40


# -- the command -------------------------------------------------------------------------------------------------------


class _Stream:
    def __init__(self, terminal):
        self.isatty = lambda: terminal


@pytest.fixture
def parsed(tmp_path):
    write_trace(two_ranks(), tmp_path / "a.json")
    write_trace(two_ranks(), tmp_path / "b.json")
    parser = argparse.ArgumentParser()
    fill(parser)
    return lambda *options: parser.parse_args([str(tmp_path / "a.json"), "-i", *options])


@pytest.mark.parametrize(
    ("stdout", "stdin", "message"),
    [
        (False, True, "-i: stdout is no terminal; leave -i out, or write a page with --html"),
        (True, False, "-i: stdin is no terminal; leave -i out, or write a page with --html"),
        (True, True, '-i: textual is not installed: pip install ".[interactive]"'),
    ],
)
def test_what_it_needs_is_one_line(parsed, monkeypatch, stdout, stdin, message):
    monkeypatch.setattr(browser, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "stdout", _Stream(stdout))
    monkeypatch.setattr(sys, "stdin", _Stream(stdin))
    with pytest.raises(UsageError) as caught:
        main(parsed())
    assert str(caught.value) == message


def test_what_it_cannot_do_at_the_same_time_is_one_line(parsed):
    with pytest.raises(UsageError) as caught:
        main(parsed("--critical-path"))
    assert str(caught.value) == "-i, --critical-path: one or the other; -i shows a run and writes nothing"


def test_a_changed_run_and_another_do_not_fit_on_the_screen(parsed):
    with pytest.raises(UsageError) as caught:
        main(parsed("--what-if", "compute=0.5x", "--against", "b.json"))
    assert str(caught.value) == "-i --what-if, --against: one or the other; the screen shows two runs at most"


@pytest.mark.parametrize(
    ("options", "titles"),
    [
        ([], ["this"]),
        (["--against", "b.json"], ["this", "against"]),
        (["--what-if", "compute=0.5x"], ["measured", "predicted"]),
    ],
)
def test_what_is_shown(parsed, monkeypatch, tmp_path, options, titles):
    shown = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("overlap.cli.timeline.check_terminal", lambda: None)
    monkeypatch.setattr("overlap.cli.timeline.browse", lambda tracks, **look: shown.append((tracks, look)))
    assert main(parsed(*options, "--fail-if", "exposed > 30%")) == 1
    (tracks, look), = shown  # fmt: skip
    assert [track.title for track in tracks] == titles
    assert look == {"window_ns": None, "ascii": False}
