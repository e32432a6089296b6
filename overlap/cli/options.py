"""Options of commands, made from `Option` records: settings of a run, and options of other commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from .. import units
from ..config import RunConfig, variable_name
from ..errors import UsageError
from ..settings import Option
from .parser import Parser

T = TypeVar("T")


def parse_group(text: str) -> tuple[int, ...]:
    """Return the ranks that `--group` lists; an error of the text, `TopologyError`, names the option."""
    from topology import TopologyError, parse_ranks  # most commands need neither

    try:
        return parse_ranks(text)
    except TopologyError as error:
        raise TopologyError(f"--group: {error}") from None


def as_argument_type(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return `read` as a type for argparse: a `UsageError` becomes an error whose message names the option."""

    def read_argument(text: str) -> T:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument


# -- options that several commands have ------------------------------------------------------------------------------

LEAST_WIDTH = 40
"""Least width of pages and pictures, in columns."""

SHARED: Mapping[str, Option] = {
    "all": Option(read=units.parse_yes_no, help="show every rank"),
    "ascii": Option(read=units.parse_yes_no, help="draw with plain characters only"),
    "chunks": Option(read=units.parse_count, metavar="N", help="stages on each rank; of interleaved-1f1b; default: 2"),
    "compare": Option(read=str, metavar="OTHER", help="compare with another run"),
    "dtype": Option(read=str, metavar="TYPE", help="data type of arrays"),
    "fail_if": Option(read=str, metavar="TEST", repeated=True, help="exit with 1 if so"),
    "group": Option(read=str, metavar="LIST", help="ranks of a group, such as 0-7 or 0-3,8-11"),
    "json": Option(read=units.parse_yes_no, help="print the result as JSON; not the page"),
    "lnc": Option(read=units.parse_count, metavar="N", help="physical cores per logical core; 1 or 2"),
    "nodes": Option(read=units.parse_count, metavar="N", help="hosts of the cluster"),
    "output": Option(read=str, metavar="FILE", short="-o", help="write the result there"),
    "root": Option(read=units.parse_integer, metavar="RANK", help="root of the collective; default: 0"),
    "seed": Option(read=units.parse_integer, metavar="N", help="seed of everything random"),
    "step": Option(read=str, metavar="N", help="step to show; default: the median one"),
    "width": Option(
        read=units.parse_count, metavar="N", help=f"columns, at least {LEAST_WIDTH}; default: the terminal's"
    ),
}
"""Options of several commands that are not settings of a run. An option means the same in all commands."""


def shared_option(name: str, remark: str = "", **details: Any) -> Option:
    """Return an option that several commands have: one of `SHARED`, or a setting of a run.

    Args:
        name: Name of the option in `SHARED`, or of the setting.
        remark: Remark for this command, which replaces the help after the first semicolon; "": the help stays.
        details: Fields of the option that are changed.
    """
    option = SHARED[name] if name in SHARED else replace(RunConfig.options()[name], rare=False, variable_only=False)
    help = f"{option.help.partition(';')[0]}; {remark}" if remark else option.help
    return replace(option, help=help, **details)


def check_width(width: int | None) -> None:
    """Raise `UsageError` if `--width` is given and below `LEAST_WIDTH`."""
    if width is not None and width < LEAST_WIDTH:
        raise UsageError(f"--width: {width} is too narrow; at least {LEAST_WIDTH} columns are needed")


def add_options(
    to: argparse.ArgumentParser | argparse._ArgumentGroup,
    options: Mapping[str, Option],
    *,
    usual: Collection[str] | None = None,
) -> None:
    """Add those options that can be given on a command line to a parser or a group.

    Args:
        to: The parser or group.
        options: Options by name.
        usual: Names of the options that `--help` shows; `--help-all` shows all. None: options that are not marked as
            rare.
    """
    for name, one in options.items():
        if one.read is not None and not one.variable_only:
            one = one if usual is None else replace(one, rare=name not in usual)
            _add_option(to.add_argument, name, one)


def given_values(args: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of the options that the command line has, by name, without those that it lacks."""
    every = {name: getattr(args, name, None) for name in options}
    return {name: value for name, value in every.items() if value is not None}


def option_flag(name: str, option: Option) -> str:
    """Return the long option of a setting: its `flag`, or by default its name with dashes, such as "--log-dir"."""
    return option.flag or f"--{name.replace('_', '-')}"


def _add_option(add: Callable[..., argparse.Action], name: str, option: Option) -> None:
    """Add an option to a parser or group by its `add_argument`, and an opposite, such as `--no-bind`, if it has one.

    An option without a metavar is a switch.
    """
    flag = option_flag(name, option)
    details: dict[str, Any] = {"action": "store_true", "default": None}
    if option.metavar is not None:
        assert option.read is not None
        action = "append" if option.repeated else "store"
        details = {"action": action, "type": as_argument_type(option.read), "metavar": option.metavar}
    flags = [flag] if option.short is None else [option.short, flag]
    written = add(*flags, dest=name, help=option.help, **details)
    if option.off is not None:
        off = f"--no-{flag[2:]}"
        negative = add(off, dest=name, action="store_false", default=None, help=option.off)
        negative.rare = True  # type: ignore[attr-defined]
    written.rare = option.rare  # type: ignore[attr-defined]


# -- settings of a run -----------------------------------------------------------------------------------------------


def add_settings(parser: Parser, config: type[RunConfig] = RunConfig) -> None:
    """Add an option for each setting that can be given as text; settings of several processes are in a group."""
    options = config.options()
    variables = ", ".join(
        variable_name(name) for name, option in options.items() if option.variable and option.read is not None
    )
    parser.epilog = f"{parser.epilog}\nVariables: {variables}.\n"
    add_options(parser, {name: option for name, option in options.items() if not option.nodes})
    group = parser.add_argument_group("several processes")
    add_options(group, {name: option for name, option in options.items() if option.nodes})


def given_settings(args: argparse.Namespace, config: type[RunConfig] = RunConfig) -> RunConfig:
    """Return the settings that options give, with the options as their sources."""
    options = config.options()
    settings = given_values(args, options)
    flags = {name: option_flag(name, options[name]) for name in settings}
    sources = {name: f"--no-{flags[name][2:]}" if value is False else flags[name] for name, value in settings.items()}
    return replace(config.from_values(**settings), sources=sources)
