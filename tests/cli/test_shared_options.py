"""Options of all commands: each name has one meaning and one spelling."""

import argparse
from collections import defaultdict
from importlib import import_module

import pytest

from overlap.cli import COMMANDS
from overlap.cli.parser import Parser


def parser_of(command):
    parser = Parser(f"overlap {command}")
    import_module(f"overlap.cli.{command}").fill(parser)
    return parser


def meanings():
    """For each option, its metavar and the meaning in its help, by command; remarks follow a semicolon."""
    found = defaultdict(dict)
    for command in COMMANDS:
        for action in parser_of(command)._actions:
            for option in action.option_strings:
                if option.startswith("--") and action.help != argparse.SUPPRESS:
                    found[option][command] = (action.metavar, action.nargs, action.help.partition(";")[0])
    return found


SHARED = {option: by_command for option, by_command in meanings().items() if len(by_command) > 1}


@pytest.mark.parametrize("option", SHARED)
def test_an_option_means_the_same_in_all_commands(option):
    assert len(set(SHARED[option].values())) == 1, SHARED[option]


def test_options_with_several_meanings_in_other_programs_are_shared_here():
    assert {"--ranks", "--json", "--trace", "--cluster", "--processes", "--step"} <= SHARED.keys()
    everywhere = meanings()
    assert everywhere["--check"].keys() == {"run"}
    assert everywhere["--faults"].keys() == {"test"}
    assert everywhere["--steps"].keys() == {"demo"}
    assert not {"--against", "--best", "--nproc-per-node"} & everywhere.keys()


@pytest.mark.parametrize("argv", [
    ["timeline", "run.json", "--against", "b.json"],
    ["why", "--against", "b.json"],
    ["run", "--stall_warning", "5", "train.py"],
    ["run", "--nproc-per-node", "2", "train.py"],
    ["plan", "all_reduce", "--check", "0-7"],
    ["simulate", "--json=a.json", "train.py"],
], ids=" ".join)  # fmt: skip
def test_a_second_spelling_is_refused(overlap, argv):
    code, out, err = overlap(*argv)
    assert (code, out) == (2, "")
    assert "unrecognized arguments: --" in err or "ignored explicit argument" in err


def test_ranks_of_a_group_are_refused_with_the_option_that_names_them(overlap):
    told = "overlap: --ranks: of a collective name the ranks of its group: --group 0-3\n"
    words = ("plan", "all_reduce", "--bytes", "8", "--cluster", "local")
    assert overlap(*words, "--ranks", "0-3") == (2, "", told)
