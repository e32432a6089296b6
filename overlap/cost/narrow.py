"""Collectives for one rank as those for all, of which the other ranks drop the result: never dearer than these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..collectives.narrowing import narrowed
from ..collectives.schedule import Schedule
from .option import Option, Wrapped

NARROWED = "narrowed"
"""Name of the algorithm."""


class Narrowed(Wrapped):
    """An option of the wider collective, for one rank. Its price is that of all, which it does not exceed."""

    def __init__(self, option: Option, collective: str, root: int) -> None:
        super().__init__(option)
        self.algorithm: str = NARROWED
        self.detail: str = f"{option.label} of {collective}, for the root alone"
        self._root = root

    @property
    def made_of(self) -> tuple[str, ...]:
        """Its own name, and what the wider option is made of."""
        return (NARROWED, *self.option.made_of)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table, not yet proved."""
        return replace(narrowed(self.option.schedule(slices), self._root), algorithm=NARROWED)


def narrowed_options(wider: Iterable[Option], collective: str, root: int) -> list[Option]:
    """Return options of a wider collective for one rank: those that have a table."""
    return [Narrowed(option, collective, root) for option in wider if option.tabled]
