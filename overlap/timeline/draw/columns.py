"""Tables of text: words to the left, figures to the right; the longest words are cut where the width is too small."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 14
"""Characters that remain at least of a text that is cut; its beginning goes."""


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, words: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table in which the columns `words` are text.

    Text is cut as far as allowed; then columns of figures at the end are left out until the rest fits.
    """
    table = [list(heads), *map(list, rows)]
    shown = list(range(len(heads)))
    wide = [max(len(row[at]) for row in table) for at in shown]
    while sum(wide[at] for at in shown) + 2 * (len(shown) - 1) > width:
        longest = max(words, key=lambda at: wide[at], default=None)
        if longest is not None and wide[longest] > _LEAST:
            wide[longest] -= 1
        elif figures := [at for at in shown[1:] if at not in words]:
            shown.remove(figures[-1])
        else:
            break
    return ["  ".join(_cell(row[at], wide[at], at in words) for at in shown).rstrip() for row in table]


def _cell(text: str, wide: int, word: bool) -> str:
    if not word:
        return text.rjust(wide)
    return text.ljust(wide) if len(text) <= wide else ".." + text[len(text) - wide + 2 :]
