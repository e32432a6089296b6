"""Pages for readers: their programs and commands run as they stand there, and what they point at is there."""

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import overlap
from overlap.testing import Ranks, RanksFailed
from tests import interpreters
from tests.errors import error_of
from tests.examples.blocks import Block, blocks, commands, matches
from tests.interpreters import Python, free_port

# -- pages for readers: their programs and commands run as they stand there, and what they point at is there -----------

# -- what the pages for readers point at is there ----------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    assert [f"{link}#{name}" for link, name in links if name and name not in anchors(page.parent / link, page)] == []


def anchors(linked, page):
    """Return the anchors of the headings of a page; of a link without a name, of its own page."""
    text = (page if linked == page.parent else linked).read_text(encoding="utf-8")
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


def test_the_first_page_leads_to_all_others():
    links = set(re.findall(r"\]\((docs/[^)#/]+\.md)", README.read_text(encoding="utf-8")))
    assert links == {f"docs/{page.name}" for page in DOCS}


def test_the_map_has_every_file_and_no_other():
    """Each module and folder of `overlap/` and `overlap/runtime/`, one a row."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    everything, runtime = re.split(r"^\| path below|^## Where new", page, flags=re.M)[:2]
    for folder, tables in (("overlap", everything), ("overlap/runtime", runtime)):
        mapped = [cell.strip("`/") for cell in re.findall(r"^\| (`.*?) \|", tables, re.M)]
        files = {path.stem for path in (ROOT / folder).iterdir() if path.suffix in ("", ".py")}
        assert sorted(mapped) == sorted(name for name in files if not name.startswith("__"))


@pytest.mark.parametrize(("name", "count"), [("docs/architecture.md", 90), ("CONTRIBUTING.md", 20)])
def test_the_paths_in_pages_for_developers_exist(name, count):
    paths = re.findall(r"`([a-z_]+/[a-z0-9_/.]*)`", (ROOT / name).read_text(encoding="utf-8"))
    assert len(paths) > count
    folders = [ROOT, ROOT / "overlap", ROOT / "overlap" / "runtime", ROOT / "overlap" / "timeline"]
    found = {path for path in paths for folder in folders for end in ("", ".py") if (folder / f"{path}{end}").exists()}
    assert [path for path in paths if path not in found] == []


def test_the_first_page_is_short():
    read = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"))
    assert len(read.split()) <= 1150


def test_the_first_page_names_the_command_that_makes_a_project():
    assert "`overlap new NAME`" in README.read_text(encoding="utf-8")


def test_the_chart_of_speed_has_the_figures_of_the_tables():
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    _, chart, tables = re.split(r"^```text$(.*?)^```$", page, maxsplit=1, flags=re.M | re.S)
    drawn = re.findall(r"^  (?:overlap|MPICH|gloo) +([\d.]+) (us|ms) ", chart, re.M)
    measured = re.findall(r"([\d.]+) (us|ms)\b", tables)
    cells = re.findall(r"(?<=\| )([\d,]+)(?= \|)", tables)  # microseconds
    measured_us = {microseconds(*figure) for figure in measured} | {float(cell.replace(",", "")) for cell in cells}
    assert len(drawn) == chart.count("s █")
    assert [figure for figure in drawn if microseconds(*figure) not in measured_us] == []


def microseconds(figure, unit):
    return round(float(figure) * (1000 if unit == "ms" else 1), 6)


def test_the_tutorial_leads_from_chapter_to_chapter():
    folder = ROOT / "docs" / "tutorial"
    chapters = sorted(page.name for page in folder.glob("[0-9]*.md"))
    assert re.findall(r"\]\(([0-9][^)]+)\)", (folder / "README.md").read_text(encoding="utf-8")) == chapters
    for name, following in pairwise(chapters):
        assert (folder / name).read_text(encoding="utf-8").rstrip().endswith(f"]({following}).")


def test_a_release_has_an_entry_in_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased"
    assert version in headings


# -- the pages' programs and commands, run as they stand there ---------------------------------------------------------

TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("[0-9]*.md"))
RUN_PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in TUTORIAL and "```" in page.read_text()
]
RUN_PAGES.append(ROOT / "CONTRIBUTING.md")
LONG = [page for page in RUN_PAGES if any(block.takes_minutes for block in blocks(page))]

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
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    check_page(page, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("page", LONG, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says_at_length(page: Path, tmp_path: Path) -> None:
    check_page(page, tmp_path, minutes=True)


def test_each_block_is_run_or_says_why_not() -> None:
    everywhere = [*TUTORIAL, *RUN_PAGES, ROOT / "README.md"]
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


# -- the README's programs, as they are printed ------------------------------------------------------------------------


def test_the_first_program_sends_gradients_while_it_computes_and_says_how_much_was_hidden() -> None:
    [program] = re.findall(r"## A training loop.*?```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {"__name__": "train"}
    assert "range(20)" in program
    assert "step=10" in program
    exec(compile(program.replace("range(20)", "range(2)"), str(README), "exec"), names)
    recorders = overlap.run(names["train"], ranks=2, timeout_s=60)  # type: ignore[arg-type]
    for recorder in recorders:
        computed = [s for s in recorder.spans() if s.kind == "compute" and s.name == "backward" and s.step == 1]
        sent = [s for s in recorder.spans() if s.name.startswith("bucket") and s.step == 1]
        assert (len(computed), len(sent)) == (8, 8)
        assert min(s.info.issued_ns for s in sent if s.info) < max(s.end_ns for s in computed)
    timeline = overlap.timeline.Timeline.collect(recorders, world_size=2)
    assert "exposed" in str(overlap.why(timeline, step=1).verdict)


def test_the_program_that_connects_prints_what_is_said(tmp_path: Path) -> None:
    text = (README.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    [program] = re.findall(r"<!-- file: meet\.py -->\n\n```python\n(.*?)```", text, re.DOTALL)
    [printed, again] = re.findall(r"^\['rank 0', .*$", text, re.MULTILINE)
    assert printed == again
    script = tmp_path / "meet.py"
    script.write_text(program.replace("29470", str(free_port())))
    ranks = [Python(script, me, cwd=tmp_path) for me in range(2)]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [printed] * 2


def test_on_two_processes_it_prints_one_verdict(tmp_path: Path) -> None:
    [program] = re.findall(r"## A training loop.*?```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    small = program.replace("(512, 512)", "(16, 16)").replace("(2, 512, 512)", "(2, 16, 16)")
    script = tmp_path / "train.py"
    script.write_text(small.replace("range(20)", "range(12)"))
    words = ["-m", "overlap", "run", "--processes", "2", "--ranks", "4", "--no-prefix", str(script)]
    run = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^step [\d.]+ \ws", run.stdout, re.MULTILINE)) == 1, run.stdout


# -- the page and the examples on testing: what they show is what is printed -------------------------------------------


NUMPY = """\
left: rank 1 has finished its program; ranks 0, 2-7 wait for it in all_reduce #2 of group 'world' \
(22_testing_ranks.py:26)
repeat: ranks.run(wrong, ranks=8, cluster='trn1.32xlarge')
right: 0.0% exposed, 786,432 bytes sent by a rank
"""

PYTORCH = """\
right: same weights on all ranks: True, 75% exposed
mismatch: rank 0 called all_reduce #6 of group 'world' (23_testing_pytorch.py:24) with float32 (1,), op='sum', where \
ranks 1-7 called all_reduce #6 of group 'world' (23_testing_pytorch.py:37) with float32 (676,), op='sum' (sizes differ)
"""


def printed_by(*argv: object) -> str:
    done = interpreters.run(*argv, cwd=ROOT, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout)


@pytest.mark.slow
def test_the_example_with_numpy() -> None:
    """22_testing_ranks."""
    assert printed_by(ROOT / "examples" / "22_testing_ranks.py") == NUMPY


@pytest.mark.slow
def test_its_tests_pass() -> None:
    where = ("-p", "no:cacheprovider", "-n", "0", "-q", "examples/22_testing_ranks.py")
    command = [sys.executable, "-m", "pytest", "-p", "pytest_overlap", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_the_example_with_pytorch() -> None:
    """23_testing_pytorch."""
    pytest.importorskip("torch", reason="torch is not installed")
    assert printed_by(ROOT / "examples" / "23_testing_pytorch.py") == PYTORCH


def test_the_page_begins_with_a_wrong_program_and_what_its_test_says(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    page = (ROOT / "docs" / "testing.md").read_text()
    [program] = re.findall(r"```python\n# train.py\n(.*?)```", page, re.DOTALL)
    [told] = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(f"# train.py\n{program}")
    assert str(error_of(RanksFailed, Ranks(tmp_path).program, "train.py", ranks=4)) == told
