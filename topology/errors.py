"""Errors and warnings of topology, and the text form of lists of ranks.

ValueError
+-- TopologyError      a cluster, a file or a group of ranks that cannot be
UserWarning
+-- TopologyWarning    a group that works, but not as well as its owner may think
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

MAX_RANKS = 1 << 20
"""Most ranks of a world, and of a list of ranks as text: far beyond any cluster, and few enough to list."""

_MOST_SUGGESTIONS = 3  # names that the error for an unknown name proposes


class TopologyError(ValueError):
    """A machine, a cluster file or a group is impossible, or breaks a rule of the machine.

    Attributes:
        problem: the mistake, in one line.
        rule: id of the violated rule, None where no rule is involved.
        rule_text: the rule in words.
        source: the document that states it.
        nearest: legal groups closest to the one that was refused, best first.
        known: the names that would have been accepted, for a misspelt name.
    """

    def __init__(
        self,
        problem: str,
        *,
        rule: str | None = None,
        rule_text: str = "",
        source: str = "",
        nearest: Sequence[tuple[int, ...]] = (),
        known: Sequence[str] = (),
    ) -> None:
        self.problem = problem
        self.rule = rule
        self.rule_text = rule_text
        self.source = source
        self.nearest: tuple[tuple[int, ...], ...] = tuple(nearest)
        self.known: tuple[str, ...] = tuple(known)
        super().__init__(problem)

    def __str__(self) -> str:
        parts = [self.problem]
        if self.rule is not None:
            parts.append(f"rule {self.rule}: {self.rule_text} [{self.source}]")
        if self.nearest:
            parts.append("nearest legal groups: " + " | ".join(format_ranks(group) for group in self.nearest))
        return "; ".join(parts)


class TopologyWarning(UserWarning):
    """A group runs, but leaves part of the machine unused or is not known to be supported."""


def unknown_name_error(kind: str, name: str, names: Sequence[str]) -> TopologyError:
    """Return the error for an unknown name, with the known names and a suggestion.

    It suggests names that begin with the unknown one; if there is none, the most similar name.

    Args:
        kind: what is named, such as "cluster".
        name: the unknown name.
        names: the known names.
    """
    begin = [candidate for candidate in names if name and candidate.startswith(name)][:_MOST_SUGGESTIONS]
    meant = begin or get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ";"
    return TopologyError(f"unknown {kind} {name!r}{hint} known: {', '.join(names)}", known=names)


def format_ranks(ranks: Sequence[int], *, most: int | None = None) -> str:
    """Write ranks as ranges: (0, 1, 2, 3, 8) becomes ``0-3,8``; `parse_ranks` reads it back.

    Args:
        ranks: Any ranks, in order.
        most: Number of ranges to write; "..." stands for the remaining ones. None: all.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:most])
    return shown if most is None or len(runs) <= most else f"{shown},..."


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read ``0-3,8`` as (0, 1, 2, 3, 8).

    Raises:
        TopologyError: The text is not numbers and ascending ranges, separated by commas, or names too many ranks.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise TopologyError(f"{text!r} is not a list of ranks: expected numbers and ranges such as 0-7 or 0-3,8")
        stop = int(last) if dash else int(first)
        if stop < int(first):
            raise TopologyError(
                f"{text!r} is not a list of ranks: the range {part.strip()} runs backwards; write the lower rank first"
            )
        if stop - int(first) + len(ranks) >= MAX_RANKS:
            raise TopologyError(
                f"{text!r} is not a list of ranks: it names more than {MAX_RANKS}, the most of a world; name fewer"
            )
        ranks.extend(range(int(first), stop + 1))
    return tuple(ranks)
