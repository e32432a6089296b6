"""The options of `overlap run`: made of the fields of the configuration, and read back into one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import options
from ..config import RunConfig, variable_of
from ..errors import UsageError
from ..options import Option, parse_transport


def as_argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse tell what a reader refuses."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reading


count, index, seconds = as_argument(options.count), as_argument(options.index), as_argument(options.seconds)
transport = as_argument(parse_transport)


def add_options(parser: argparse.ArgumentParser, config: type[RunConfig] = RunConfig) -> None:
    """Add an option for each field that text can say; a name may be written with dashes or with underscores."""
    nodes = parser.add_argument_group("several processes, one for each node")
    for name, one in config.options().items():
        if one.read is not None:
            _add((nodes if one.nodes else parser).add_argument, name, one)


def given(args: argparse.Namespace, config: type[RunConfig] = RunConfig) -> RunConfig:
    """Return what the options say."""
    said = {name: getattr(args, name) for name, one in config.options().items() if one.read is not None}
    found = config.given(**said)
    flags = {name: flag_of(name, one) for name, one in config.options().items()}
    negated = {name: f"--no-{flags[name][2:]}" for name, value in said.items() if value is False}
    return replace(found, sources={name: negated.get(name, flags[name]) for name in found.sources})


def variables(config: type[RunConfig] = RunConfig) -> list[str]:
    """Return the names of the environment variables, in order."""
    return [variable_of(name) for name, one in config.options().items() if one.variable and one.read is not None]


def flag_of(name: str, one: Option) -> str:
    """Return the option of a field."""
    return one.flag or f"--{name.replace('_', '-')}"


def _add(add: Callable[..., object], name: str, one: Option) -> None:
    help = argparse.SUPPRESS if one.hidden else one.help
    flag = flag_of(name, one)
    if one.metavar is None:
        _put(add, flag, dest=name, action="store_true", default=None, help=help)
        if one.off is not None:
            _put(add, f"--no-{flag[2:]}", dest=name, action="store_false", default=None, help=one.off)
    else:
        assert one.read is not None
        _put(add, flag, dest=name, type=as_argument(one.read), metavar=one.metavar, help=help)


def _put(add: Callable[..., object], flag: str, **details: Any) -> None:
    add(flag, **details)
    if "-" in flag[2:]:
        add(f"--{flag[2:].replace('-', '_')}", **details | {"help": argparse.SUPPRESS})
