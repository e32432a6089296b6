"""Typed access to a TOML table that says, in one line, which key of which file is wrong and what it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from typing import cast

from .errors import TopologyError
from .machine import Figure
from .rules import MARKS, Confidence

Table = dict[str, object]


class Reader:
    """One table of a document: each getter takes a key once, `finish` refuses what nobody asked for.

    Args:
        table: the parsed TOML table.
        where: the file's name, for messages.
        path: dotted key of the table, "" at the top.
    """

    __slots__ = ("_asked", "_path", "_table", "where")

    def __init__(self, table: Mapping[str, object], where: str, path: str = "") -> None:
        self.where = where
        self._table = table
        self._path = path
        self._asked: set[str] = set()

    def at(self, key: str) -> str:
        """Name a key in full: ``links.efa.latency_s``."""
        return f"{self._path}.{key}" if self._path else key

    def bad(self, key: str, expected: str, found: object) -> TopologyError:
        """Build the error for a key that holds the wrong thing."""
        return TopologyError(f"{self.where}: {self.at(key)}: expected {expected}, found {found}")

    def names(self) -> tuple[str, ...]:
        """List the keys of this table, in the order of the file."""
        return tuple(self._table)

    def finish(self) -> None:
        """Refuse keys that no getter asked for, so that a misspelt key is not silently ignored.

        Raises:
            TopologyError: naming the key and the closest one that exists.
        """
        for key in self._table:
            if key not in self._asked:
                close = get_close_matches(key, sorted(self._asked), n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(self._asked))}"
                raise TopologyError(f"{self.where}: {self.at(key)}: unknown key; {hint}")

    def _get(self, key: str, default: object, expected: str) -> object:
        self._asked.add(key)
        value = self._table.get(key, default)
        if value is None:
            raise TopologyError(f"{self.where}: {self.at(key)}: missing, expected {expected}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string."""
        value = self._get(key, default, "a text")
        if not isinstance(value, str):
            raise self.bad(key, "a text", repr(value))
        return value

    def choice(self, key: str, known: Sequence[str], default: str | None = None, *, explain: str = "") -> str:
        """Read one of the known names."""
        expected = (f"{explain}: " if explain else "one of ") + (", ".join(known) or "none is declared")
        value = self._get(key, default, expected)
        if value not in known:
            raise self.bad(key, expected, repr(value))
        return cast("str", value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Read true or false."""
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.bad(key, "true or false", repr(value))
        return value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Read a whole number of at least `minimum`."""
        value = self._get(key, default, "a whole number")
        if not _is_integer(value) or cast("int", value) < minimum:
            raise self.bad(key, f"a whole number, {minimum} or more", repr(value))
        return cast("int", value)

    def count_or_any(self, key: str) -> int | None:
        """Read a whole number, or "any" as None."""
        if self._table.get(key) == "any":
            self._asked.add(key)
            return None
        return self.integer(key)

    def integers(self, key: str, default: Sequence[int] | None = None, *, minimum: int = 1) -> tuple[int, ...]:
        """Read a list of whole numbers."""
        expected = f"a list of whole numbers, {minimum} or more"
        value = self._get(key, default, expected)
        if not isinstance(value, list | tuple) or not all(_is_integer(item) and item >= minimum for item in value):
            raise self.bad(key, expected, repr(value))
        return tuple(value)

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """Read a list of pairs of whole numbers."""
        expected = "a list of pairs such as [[0, 1], [1, 2]]"
        value = self._get(key, None, expected)
        good = isinstance(value, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(_is_integer(end) and end >= 0 for end in pair)
            for pair in value
        )
        if not good:
            raise self.bad(key, expected, repr(value))
        return tuple((first, second) for first, second in cast("list[list[int]]", value))

    def texts(self, key: str, default: Sequence[str] = (), *, known: Sequence[str] = ()) -> tuple[str, ...]:
        """Read a list of strings, each one of `known` if that is given."""
        expected = f"a list of {', '.join(known)}" if known else "a list of texts"
        value = self._get(key, default, expected)
        good = isinstance(value, list | tuple) and all(
            isinstance(item, str) and (not known or item in known) for item in value
        )
        if not good:
            raise self.bad(key, expected, repr(value))
        return tuple(cast("Sequence[str]", value))

    def table(self, key: str, default: Mapping[str, object] | None = None) -> Reader:
        """Open a table inside this one."""
        value = self._get(key, default, "a table")
        if not isinstance(value, dict):
            raise self.bad(key, "a table", repr(value))
        return Reader(value, self.where, self.at(key))

    def tables(self, key: str) -> tuple[Reader, ...]:
        """Open an array of tables, empty if the key is absent."""
        value = self._get(key, (), "an array of tables")
        if not isinstance(value, list | tuple) or not all(isinstance(item, dict) for item in value):
            raise self.bad(key, "an array of tables", repr(value))
        return tuple(Reader(item, self.where, f"{self.at(key)}[{index}]") for index, item in enumerate(value))

    def figure(self, key: str, *, zero: bool = False) -> Figure:
        """Read a positive number, bare or with its source and confidence; `zero` allows 0."""
        value = self._get(key, None, "a number, or { value, source, confidence }")
        if not isinstance(value, dict):
            return Figure(value=self._number(key, value, zero=zero), source=self.where, confidence="E")
        table = self.table(key)
        figure = Figure(
            value=table._number("value", table._get("value", None, "a number"), zero=zero),
            source=table.text("source", self.where),
            confidence=cast("Confidence", table.choice("confidence", MARKS, "E")),
        )
        table.finish()
        return figure

    def figure_or_none(self, key: str) -> Figure | None:
        """Read a figure that a file may leave out."""
        self._asked.add(key)
        return self.figure(key) if key in self._table else None

    def _number(self, key: str, value: object, *, zero: bool) -> float:
        expected = "a number, 0 or more" if zero else "a positive number"
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.bad(key, expected, repr(value))
        if value < 0 or (value == 0 and not zero):
            raise self.bad(key, expected, repr(value))
        return float(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
