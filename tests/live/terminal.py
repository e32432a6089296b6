"""A terminal as far as our live screens need one: what is on it after what was written."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|([^\x1b])", re.DOTALL)


class Terminal:
    """So many rows and columns, an alternate screen, and a cursor.

    Attributes:
        rows: How many.
        cursor_shown: Whether it is.
        on_alternate: Whether the alternate screen is shown.
    """

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.cursor_shown, self.on_alternate = True, False
        self._lines = self._empty()
        self._main: tuple[list[str], int, int] | None = None
        self._row = self._column = 0
        self._rest = ""

    def _empty(self) -> list[str]:
        return [" " * self.columns for _ in range(self.rows)]

    @property
    def text(self) -> list[str]:
        """Its lines, without blanks at their ends."""
        return [line.rstrip() for line in self._lines]

    def resize(self, columns: int, rows: int) -> None:
        """Be of another size; what was there stays as far as there is room."""
        self._lines = [line[:columns].ljust(columns) for line in self._lines[:rows]]
        self._lines += [" " * columns] * (rows - len(self._lines))
        self.columns, self.rows = columns, rows
        self._row, self._column = min(self._row, rows - 1), min(self._column, columns - 1)

    def feed(self, data: str) -> None:
        """Take what is written; a sequence may come in parts."""
        data, end = self._rest + data, 0
        for match in _SEQUENCE.finditer(data):
            if match.start() != end:
                break
            end = match.end()
            private, numbers, letter, plain = match.groups()
            if plain:
                self._put(plain)
            else:
                self._control(private + letter, [int(each or 0) for each in numbers.split(";")])
        self._rest = data[end:]
        if len(self._rest) > 20:
            raise AssertionError(f"no terminal knows {self._rest[:20]!r}")

    def _put(self, letter: str) -> None:
        if letter == "\n":
            self._column = 0  # as terminals are set up
            if self._row == self.rows - 1:
                self._lines = [*self._lines[1:], " " * self.columns]
            else:
                self._row = min(self._row + 1, self.rows - 1)
        elif letter == "\r":
            self._column = 0
        else:
            if self._column >= self.columns:
                raise AssertionError(f"a line is wider than {self.columns} columns: {self._lines[self._row]!r}")
            line = self._lines[self._row]
            self._lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
            self._column += 1

    def _control(self, name: str, numbers: list[int]) -> None:
        first = numbers[0]
        match name:
            case "H":
                row, column = first or 1, (numbers[1:] or [1])[0] or 1
                if not (row <= self.rows and column <= self.columns):
                    raise AssertionError(f"the cursor is sent to {row}, {column} of {self.rows}, {self.columns}")
                self._row, self._column = row - 1, column - 1
            case "K":
                self._lines[self._row] = self._lines[self._row][: self._column].ljust(self.columns)
            case "J":
                self._control("K", [0])
                self._lines[self._row + 1 :] = [" " * self.columns] * (self.rows - self._row - 1)
            case "?h" | "?l" if first == 25:
                self.cursor_shown = name == "?h"
            case "?h" if first == 1049:
                self._main, self.on_alternate = (self._lines, self._row, self._column), True
                self._lines = self._empty()
            case "?l" if first == 1049 and self._main:
                (self._lines, self._row, self._column), self.on_alternate = self._main, False
            case "m":
                pass
            case _:
                raise AssertionError(f"no terminal knows {name} {numbers}")
