"""The pages' programs and commands, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.blocks import Block, blocks, commands, matches

ROOT = Path(__file__).parents[2]
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in TUTORIAL and "```" in page.read_text()]
PAGES.append(ROOT / "CONTRIBUTING.md")
LONG = [page for page in PAGES if any(block.takes_minutes for block in blocks(page))]

SLOW_MACHINE = re.compile(
    r"^.*overlap: (\d+ of \d+ joined; missing|simulating \d+ ranks:|process \d+ waits for process \d+ at) .*\n", re.M
)
"""Notices that a busy machine adds to what a page shows."""

NOT_RUN = {
    "architecture.md": 1,
    "CONTRIBUTING.md": 2,
    "README.md": 4,
    "engines.md": 3,
    "launch.md": 1,
    "speed.md": 2,
    "survive.md": 2,
    "testing.md": 1,
    "trio.md": 1,
    "watch.md": 1,
    "why.md": 3,
}
"""Blocks that cannot run here, by page: each says why beside it. More of them need a better reason."""


def check_page(page: Path, folder: Path, *, minutes: bool = False) -> None:
    """Run the blocks of a page in a folder; raise an AssertionError at the first that does something else.

    Args:
        page: The page.
        folder: An empty one.
        minutes: Whether blocks that take minutes are run, too.
    """
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    missing = set()
    for block in blocks(page):
        needed = block.told.get("needs")
        if not block.is_run or (block.takes_minutes and not minutes):
            continue
        if name := block.told.get("file"):
            (folder / name).write_text(block.text, encoding="utf-8")
        elif needed and find_spec(needed) is None:
            missing.add(needed)
        elif block.kind == "python":
            (folder / "block.py").write_text(block.text, encoding="utf-8")
            check(block, "python block.py", None, folder)
        else:
            for command in commands(block):
                check(block, command.line, command.output, folder)
    if missing:  # all other blocks have been run
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")


def check(block: Block, line: str, expected: str | None, folder: Path) -> None:
    """Run a command in a folder and compare what it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OVERLAP_", "PYTEST_"))}
    environ |= {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "OVERLAP_FLIGHT_DIR": str(folder / "records"),
    }
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=1000 if block.takes_minutes else 100,
    )  # fmt: skip
    where = f"{block.page.name}:{block.line}: $ {line}\n{done.stdout}"
    assert done.returncode == int(block.told.get("exit code", "0")), where
    if expected is not None and "looks like this" not in block.told:
        printed = SLOW_MACHINE.sub("", done.stdout)
        assert matches(printed, expected, figures="figures differ" not in block.told), where


def test_the_first_page_does_what_it_says(tmp_path: Path) -> None:
    check_page(ROOT / "README.md", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", TUTORIAL, ids=lambda page: page.stem)
def test_a_chapter_of_the_tutorial_does_what_it_says(chapter: Path, tmp_path: Path) -> None:
    for page in TUTORIAL[: TUTORIAL.index(chapter)]:
        for block in blocks(page):
            if name := block.told.get("file"):
                (tmp_path / name).write_text(block.text, encoding="utf-8")
    check_page(chapter, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    check_page(page, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("page", LONG, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says_at_length(page: Path, tmp_path: Path) -> None:
    check_page(page, tmp_path, minutes=True)


def test_each_block_is_run_or_says_why_not() -> None:
    everywhere = [*TUTORIAL, *PAGES, ROOT / "README.md"]
    left = [block for page in everywhere for block in blocks(page) if not (block.is_run or block.is_data)]
    assert [f"{block.page.name}:{block.line}" for block in left if not block.told.get("not run")] == []
    assert dict(Counter(block.page.name for block in left)) == NOT_RUN


@pytest.mark.parametrize(
    ("printed", "expected", "figures", "same"),
    [
        ("a\nb\n", "a\nb\n", True, True),
        ("a\nb\n", "a\nc\n", True, False),
        ("a\n1\n2\nb\n", "a\n...\nb\n", True, True),
        ("a\n1\n2\n", "a\n...\n", True, True),
        ("rank 3 failed: late\n", "rank 3 ... late\n", True, True),
        ("step 3.25 ms, 40%\n", "step 12 us, 5%\n", False, True),
        ("step 3.25 ms\n", "step 12 us\n", True, False),
        ("wave 3.25 ms\n", "step 12 us\n", False, False),
    ],
)
def test_output_is_compared(printed: str, expected: str, figures: bool, same: bool) -> None:
    assert matches(printed, expected, figures=figures) is same


def test_a_page_that_says_something_else_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- file: a.py -->\n\n```python\nprint(3)\n```\n\n```console\n$ python a.py\n4\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:8: \$ python a\.py"):
        check_page(page, tmp_path)
    page.write_text(page.read_text().replace("\n4\n", "\n3\n"))
    check_page(page, tmp_path)
