"""The site: its reference has every public name and command, its navigation every page, and links lead somewhere."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import overlap
from overlap.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = loaded()


def test_the_reference_has_every_public_name() -> None:
    """Of a name that is not there, the strict build says so."""
    there = {name for _, _, text in build.reference() for name in re.findall(r"^::: (\S+)$", text, re.M)}
    missing = []
    for house in build.HOUSES:
        for path in (ROOT / house).rglob("__init__.py"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    names = ast.literal_eval(node.value)
                    missing += [f"{package}.{name}" for name in names if f"{package}.{name}" not in there]
    assert missing == []
    assert {"overlap.run", "overlap.parallel.Pipeline", "transports.Paced", "topology.Cluster"} <= there


def test_the_reference_has_every_command_with_all_its_options() -> None:
    pages = build.commands()
    assert list(pages) == list(COMMANDS)
    assert "--checksums" in pages["run"]
    assert all(f"usage: overlap {name}" in text for name, text in pages.items())


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OTHERS = {"--quiet", "--index-url", "--randomly-seed", "--nproc-per-node"}  # of pip, pytest and torchrun
OTHERS |= {"--batch", "--bucket-bytes", "--slow", "--vs"}  # of programs on the pages, and of benchmarks


def test_pages_spell_options_as_help_does() -> None:
    known: dict[str, str] = build.commands()
    wrong: list[tuple[str, ...]] = []
    everywhere = OTHERS.union(*(OPTION.findall(text) for text in known.values()))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        wrong += [(page.name, option) for option in OPTION.findall(text) if option not in everywhere]
        for name, words in re.findall(r"\boverlap (\w+)((?: [^\s`|]+)*)", text):
            used = OPTION.findall(words.partition(".py")[0])  # what follows a program belongs to it
            wrong += [(page.name, name, option) for option in used if option not in known.get(name, option)]
    assert wrong == []


def test_the_navigation_has_every_page() -> None:
    told = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- (\S+\.md)$", told, re.M)
    assert sorted(listed) == sorted(
        page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")
    )


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("training.md", "../examples/18_strategies.py", "repository/examples/18_strategies.py.md"),
        ("how-to/zero.md", "../../examples/12_zero.py", "../repository/examples/12_zero.py.md"),
        ("how-to/zero.md", "data-parallel.md#variants", "data-parallel.md#variants"),
        ("README.md", "../CONTRIBUTING.md", "repository/CONTRIBUTING.md"),
        ("repository/CONTRIBUTING.md", "docs/speed.md", "../speed.md"),
        ("concepts.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_out_of_the_folder_lead_to_pages_of_the_site(page: str, link: str, moved: str) -> None:
    on = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    text = build.on_page_markdown(f"[a]({link})", on)
    assert text.removeprefix(build.on_page_markdown("", on)) == f"[a]({moved})"


def test_the_first_page_opens_with_the_readme_and_the_picture_of_the_demo() -> None:
    page = build.on_page_markdown("# Documentation\n", SimpleNamespace(file=SimpleNamespace(src_uri="README.md")))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.startswith(readme[: readme.index("\n\n", 20)])
    assert (
        page.index("python hello.py")
        < page.index("on the wire\n```\n")
        < page.index("## Install")
        < page.index("## Documentation\n")
    )
    assert "[torch first](testing.md#in-continuous-integration)" in page


def test_the_site_shows_its_navigation_at_1200_pixels(tmp_path: Path) -> None:
    styles = tmp_path / "assets" / "stylesheets"
    styles.mkdir(parents=True)
    (styles / "main.css").write_text("@media screen and (min-width:76.25em){.md-sidebar{display:block}}")
    build.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    [width_em] = re.findall(r"min-width:([\d.]+)em", (styles / "main.css").read_text())
    assert float(width_em) * 16 <= 1200
    with pytest.raises(SystemExit, match="other widths"):
        build.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))


def test_a_build_without_the_extra_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["build.py"])
    assert build.main() == 2
    assert capsys.readouterr().err == 'the site needs mkdocs, material, mkdocstrings: pip install ".[docs]"\n'


def test_the_reference_shows_no_inside_of_futures_and_streams() -> None:
    page = build.page_of_package("overlap", ["CollectiveFuture", "Group"])
    assert "members: [op, name, call_site, src, done, " in page
    assert "::: overlap.Group\n\n" in page
    for name, members in build.USED.items():
        told = getattr(overlap, name.removeprefix("overlap."))
        declared = {each for base in told.__mro__ for each in (*vars(base), *getattr(base, "__annotations__", ()))}
        assert declared >= set(members)


def test_the_reference_starts_with_run_and_rank_and_ends_with_constants() -> None:
    names = re.findall(r"^::: overlap\.(\S+)$", build.page_of_package("overlap", overlap.__all__), re.M)
    assert (names[:2], names[-1], len(names)) == (["run", "Rank"], "OPS", len(overlap.__all__))
