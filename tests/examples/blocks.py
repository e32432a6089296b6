"""Code blocks of the pages: which there are, and what is done with each.

A comment of Markdown before a block says what the block is:

    <!-- file: train.py -->       is written to that file, for the blocks below it
    <!-- printed by: command -->  is the output of that command, which is run
    <!-- figures differ -->       the output is compared without its numbers
    <!-- looks like this -->      the command is run, and its output is not compared
    <!-- exit code: 1 -->         what the command exits with; 0 if nothing is said
    <!-- needs: torch -->         is run where that module is installed
    <!-- takes minutes -->        is run with the tests marked `soak`
    <!-- not run: reason -->      is neither run nor compared

Without one, a block of `python` is run as a script. Each command of a `console` block is run and its output compared: a
line of dots stands for any lines, and dots within a line for any text. Blocks of one page share a folder, in which
`examples` is that of the repository. Every block of Python, shell and output is run, or says why not.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?P<told>(?:^<!--[^>]*-->\n\n?)*)^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_TOLD = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One code block of a page."""

    page: Path
    line: int  # Of its text
    kind: str  # The language of the block
    text: str
    told: dict[str, str]  # The comments before it

    @property
    def is_run(self) -> bool:
        """Whether anything is done with it."""
        known = self.kind in ("python", "console") or "printed by" in self.told or "file" in self.told
        return known and "not run" not in self.told

    @property
    def is_data(self) -> bool:
        """Whether it is a file for other programs, of which nothing here could be run."""
        return self.kind in ("toml", "yaml")

    @property
    def takes_minutes(self) -> bool:
        """Whether it is too long for the slow tests."""
        return "takes minutes" in self.told


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a console block, and the output below it."""

    line: str
    output: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        told = {name: value or "" for name, value in _TOLD.findall(found["told"])}
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page=page, line=line, kind=found["kind"], text=found["text"], told=told)


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a console block, or the one that prints the block; a backslash continues a line."""
    if line := block.told.get("printed by"):
        yield Command(line=line, output=block.text)
        return
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        line, _, output = part.replace("\\\n", "").partition("\n")
        yield Command(line=re.sub(r" {2,}#.*", "", line), output=output)


def matches(printed: str, expected: str, *, figures: bool) -> bool:
    """Whether output is as a page says.

    Args:
        printed: What a command has printed.
        expected: What stands on the page.
        figures: Whether numbers are compared.
    """
    printed, expected = (
        "\n".join(line.rstrip() for line in text.strip("\n").split("\n")) for text in (printed, expected)
    )
    if not figures:
        printed, expected = _without_figures(printed), _without_figures(expected)
    parts = re.split(r"^\.\.\.$\n?|\n\.\.\.$|\.\.\.", expected, flags=re.M)
    return re.fullmatch(".*".join(map(re.escape, parts)), printed, re.S) is not None


def _without_figures(text: str) -> str:
    """Return text without numbers and their units, and with one blank in place of several."""
    plain = re.sub(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?(?: ?(?:ns|us|ms|s|B|KiB|MiB|GiB)\b)?%?", "0", text)
    return re.sub(r"[ \n]+", " ", plain)
