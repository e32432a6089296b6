import argparse
import os
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from overlap.cli.console import Console
from overlap.cli.timeline import add_arguments, main
from overlap.errors import UsageError
from overlap.timeline import write_trace
from tests.timeline.made import render_text


@pytest.fixture
def command(tmp_path, training, capsys, monkeypatch):
    """Return a function that runs `overlap timeline FILE ...` on a run of three ranks and returns what it printed."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.trace.json"
    write_trace(training(3), path)
    parser = argparse.ArgumentParser(prog="overlap")
    add_arguments(parser)

    def run(*argv, file=path):
        assert main(parser.parse_args([str(file), *argv])) == 0
        return capsys.readouterr().out

    return run


def test_without_options_the_median_step_is_drawn_and_named(command, training):
    first, _, rest = command().partition("\n")
    assert first == "showing step 1, the median of 3 by wall time (--step N|all)"
    assert stripped(rest) == render_text(training(3), step=1)


def test_the_line_that_names_the_step_keeps_to_a_narrow_page(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = command().splitlines()[:2]
    assert shown == ["showing step 1, the median of 3 by wall", "time (--step N|all)"]


def test_a_terminal_that_is_too_narrow_breaks_the_lines_itself(command, training, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert stripped(command("--step", "1")) == render_text(training(3), step=1, width=40)


def test_a_terminal_that_does_not_know_its_width_is_shown_the_usual(command, training, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert stripped(command("--step", "1")) == render_text(training(3), step=1, width=80)


def test_a_console_follows_its_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    columns = [90, 120, 70]
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((columns[0], 24)))
    console = Console()
    assert [(console.width, columns.pop(0))[0] for _ in range(3)] == [90, 120, 70]


@pytest.mark.parametrize("option", [(), ("--width", "9" * 20)])
def test_a_width_that_no_terminal_has_is_shown_in_ten_thousand_columns(option, command, training, monkeypatch):
    monkeypatch.setenv("COLUMNS", "9" * 20)
    assert stripped(command("--step", "1", *option)) == render_text(training(3), step=1, width=10_000)


def test_step_ranks_width_and_ascii(command, training):
    shown = command("--step", "2", "--rank", "0,2", "--width", "100", "--ascii")
    assert shown == render_text(training(3), step=2, ranks=[0, 2], width=100, ascii=True)


def test_all_steps(command, training):
    assert stripped(command("--step", "all")) == render_text(training(3))
    assert stripped(command("--step", "all", "--all")) == render_text(training(3), all=True)


def stripped(text):
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--step", "x"), "--step: 'x' is neither a number nor 'all'; recorded steps: 0-2"),
        (("--step", "7"), "step: nobody recorded step 7; recorded are 0-2"),
        (("--rank", "a"), "--rank: 'a' is not a rank or a range such as 3-5"),
        (("--rank", "0-"), "--rank: '0-' is not a rank or a range such as 3-5"),
        (("--rank", ""), "--rank: '' is not a rank or a range such as 3-5"),
        (("--rank", "0-99999999"), "--rank: '0-99999999' makes more than 1000000 ranks; name fewer"),
        (("--rank", "2-4"), "ranks: 3-4 did not record step 1; recorded are 0-2"),
        (("--width", "39"), "--width: 39 is too narrow; at least 40 columns are needed"),
        (("-o", "/nowhere/x.svg"), "--output: there is no folder /nowhere; make it, or name a file elsewhere"),
    ],
)
def test_user_errors_are_one_line(command, argv, message):
    with pytest.raises(UsageError) as caught:
        command(*argv)
    assert str(caught.value) == message


def test_a_missing_file_is_a_user_error(command, tmp_path):
    with pytest.raises(UsageError, match=r"none\.json: cannot be read"):
        command(file=tmp_path / "none.json")


OPTIONS = {
    "-o": ["o.json"], "--step": ["1"], "--rank": ["0"], "--all": [], "--width": ["60"], "--ascii": [], "--ops": [],
    "--critical-path": [],
}  # fmt: skip
REFUSED = {"-o": OPTIONS.keys() - {"-o"}}


@pytest.mark.parametrize("pair", list(combinations(OPTIONS, 2)), ids=" ".join)
def test_two_options_do_what_each_is_for_or_are_refused(command, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word for option in pair for word in (option, *OPTIONS[option])]
    one, other = pair
    if other in REFUSED.get(one, ()) or one in REFUSED.get(other, ()):
        (refused,) = set(pair) - {"-o"}
        with pytest.raises(UsageError, match=rf"^{refused}: not possible with -o, .*; leave out {refused} or -o$"):
            command(*words)
        assert [*tmp_path.iterdir()] == [tmp_path / "run.trace.json"]
        return
    assert command(*words)


@pytest.mark.parametrize("option", ["--step", "--rank", "--all", "--ascii"])
def test_a_picture_is_written_with_the_characters_of_the_terminal(command, option, tmp_path):
    assert command("-o", str(tmp_path / "a.svg"), option, *OPTIONS[option]) == ""
    texts = [each.text or "" for each in ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")]
    drawn = " ".join(texts).replace("\xa0", " ")
    assert re.search(r"exposed 4\.\d \(3\d%\): 4\.\d on the wire", drawn)
    assert "compute" in drawn
