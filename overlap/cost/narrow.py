"""Collectives for one rank from collectives for all, without the other ranks' results: never dearer than these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..collectives.narrowing import narrow_to_root
from ..collectives.schedule import Schedule
from .option import AlgorithmOption, Wrapped

NARROWED = "narrowed"
"""Name of the algorithm."""


class Narrowed(Wrapped):
    """An option of the wider collective, for one rank. Its price is the wider option's, an upper bound."""

    def __init__(self, option: AlgorithmOption, collective: str, root: int) -> None:
        super().__init__(option)
        self.algorithm: str = NARROWED
        self.detail: str = f"{option.label} of {collective}, for the root alone"
        self._root = root

    @property
    def made_of(self) -> tuple[str, ...]:
        """Its own name, and the names that make up the wider option."""
        return (NARROWED, *self.option.made_of)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table, not yet proved."""
        return replace(narrow_to_root(self.option.schedule(slices), self._root), algorithm=NARROWED)


def narrowed_options(wider: Iterable[AlgorithmOption], collective: str, root: int) -> list[AlgorithmOption]:
    """Return the options of a wider collective that have a table, narrowed to one rank."""
    return [Narrowed(option, collective, root) for option in wider if option.tabled]
