"""What the pages for readers point at is there."""

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

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
