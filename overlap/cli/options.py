"""Options of commands, made from `Option` records: settings of a run, and options of other commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from .. import units
from ..config import RunConfig, variable_of
from ..errors import UsageError
from ..settings import Option, parse_transport
from .parser import HelpAll, mark_rare

T = TypeVar("T")

_HIDDEN = argparse.SUPPRESS


def as_argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a reader for argparse, which reports its `UsageError` with the name of the option."""

    def reading(text: str) -> T:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reading


count: Callable[[str], int] = as_argument(units.count)
index: Callable[[str], int] = as_argument(units.index)
seconds: Callable[[str], float] = as_argument(units.seconds)
transport: Callable[[str], str] = as_argument(parse_transport)


LEAST_WIDTH = 40
"""Columns that pages and pictures need."""


def check_width(width: int | None) -> None:
    """Refuse a `--width` that is too narrow.

    Raises:
        UsageError: If it is.
    """
    if width is not None and width < LEAST_WIDTH:
        raise UsageError(f"--width: {width} is too narrow; at least {LEAST_WIDTH} columns are needed")


def add_options(
    to: argparse.ArgumentParser | argparse._ArgumentGroup,
    options: Mapping[str, Option],
    *,
    usual: Collection[str] | None = None,
) -> None:
    """Add options to a parser or a group; a name may be written with dashes or with underscores.

    Args:
        to: The parser or group.
        options: By name.
        usual: Names that `--help` shows, besides `--help-all`; None: those that are not marked as rare.
    """
    for name, one in options.items():
        if one.read is not None:
            one = one if usual is None else replace(one, rare=name not in usual)
            _add(to.add_argument, name, one)


def values(args: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of the given options by name."""
    told = {name: getattr(args, name) for name, one in options.items() if one.read is not None}
    return {name: value for name, value in told.items() if value is not None}


def flag_of(name: str, one: Option) -> str:
    """Return the option of a field."""
    return one.flag or f"--{name.replace('_', '-')}"


def _add(add: Callable[..., argparse.Action], name: str, option: Option) -> None:
    help = _HIDDEN if option.hidden else option.help
    flag, put = flag_of(name, option), partial(_put, add, rare=option.rare, dest=name)
    if option.metavar is None:
        put(flag, action="store_true", default=None, help=help)
        if option.off is not None:
            put(f"--no-{flag[2:]}", action="store_false", default=None, help=option.off)
    else:
        assert option.read is not None
        action = "append" if option.repeated else "store"
        put(flag, type=as_argument(option.read), metavar=option.metavar, action=action, help=help)
        for spelling in option.also:
            put(spelling, type=as_argument(option.read), metavar=option.metavar, action=action, help=_HIDDEN)


def _put(add: Callable[..., argparse.Action], flag: str, *, rare: bool, **details: Any) -> None:
    action = add(flag, **details)
    if rare:
        mark_rare(action)
    if "-" in flag[2:]:
        add(f"--{flag[2:].replace('-', '_')}", **details | {"help": _HIDDEN})


# -- settings of a run -----------------------------------------------------------------------------------------------


def add_settings(parser: argparse.ArgumentParser, config: type[RunConfig] = RunConfig) -> None:
    """Add an option for each setting that text can set; settings of several processes get their own group."""
    options = config.options()
    variables = ", ".join(
        variable_of(name) for name, option in options.items() if option.variable and option.read is not None
    )
    parser.add_argument("--help-all", action=HelpAll, more=f"Variables: {variables}.\n")
    add_options(parser, {name: option for name, option in options.items() if not option.nodes})
    group = parser.add_argument_group("several processes")
    add_options(group, {name: option for name, option in options.items() if option.nodes})


def given(args: argparse.Namespace, config: type[RunConfig] = RunConfig) -> RunConfig:
    """Return the settings that options give, with the options as their sources."""
    told = config.options()
    said = values(args, told)
    flags = {name: flag_of(name, one) for name, one in told.items()}
    negated = {name: f"--no-{flags[name][2:]}" for name, value in said.items() if value is False}
    return replace(config.given(**said), sources={name: negated.get(name, flags[name]) for name in said})
