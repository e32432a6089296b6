"""The pages' programs and commands, run as they stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.blocks import Block, blocks, commands, matches

ROOT = Path(__file__).parents[2]
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))

NOT_RUN: dict[str, int] = {}
"""Blocks that cannot run here, by page: each says why beside it."""


def run_page(page: Path, folder: Path) -> None:
    """Run the blocks of a page in a folder; raise an AssertionError at the first that does something else."""
    for block in blocks(page):
        if not block.is_run:
            continue
        if name := block.told.get("file"):
            (folder / name).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            (folder / "block.py").write_text(block.text, encoding="utf-8")
            check(block, "python block.py", None, folder)
        elif block.kind == "console":
            for command in commands(block):
                check(block, command.line, command.output, folder)


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
        stderr=subprocess.STDOUT, text=True, timeout=100,
    )  # fmt: skip
    where = f"{block.page.name}:{block.line}: $ {line}\n{done.stdout}"
    assert done.returncode == int(block.told.get("exit code", "0")), where
    if expected is not None and "looks like this" not in block.told:
        assert matches(done.stdout, expected, figures="figures differ" not in block.told), where


def test_the_first_page_does_what_it_says(tmp_path: Path) -> None:
    run_page(ROOT / "README.md", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", TUTORIAL, ids=lambda page: page.stem)
def test_a_chapter_of_the_tutorial_does_what_it_says(chapter: Path, tmp_path: Path) -> None:
    for page in TUTORIAL[: TUTORIAL.index(chapter)]:
        for block in blocks(page):
            if name := block.told.get("file"):
                (tmp_path / name).write_text(block.text, encoding="utf-8")
    run_page(chapter, tmp_path)


def test_what_is_not_run_is_counted() -> None:
    counted = {page.name: sum(not block.is_run for block in blocks(page)) for page in TUTORIAL}
    assert {name: count for name, count in counted.items() if count} == NOT_RUN


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
        run_page(page, tmp_path)
    page.write_text(page.read_text().replace("\n4\n", "\n3\n"))
    run_page(page, tmp_path)
