"""Builds the site of the documentation: `python docs/build.py`, in an environment with the extra `docs`.

This is also the site's hook for MkDocs. It adds pages that are not written by hand: the reference of every public name
and every command, and each file of the repository that a page names, such as the examples.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
HOUSES = ("overlap", "transports", "topology")
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".toml": "toml"}

_FUTURE = ("done", "result", "exception", "wait", "add_done_callback", "cancel", "cancelled")
USED = {
    "overlap.Future": _FUTURE,
    "overlap.CollectiveFuture": ("op", "name", "call_site", "src", *_FUTURE),
    "overlap.ComputeFuture": ("name", "call_site", *_FUTURE),
    "overlap.Stream": ("name", "priority", "window", "rank"),
    "overlap.Connection": ("rank", "size", "group", "split", "run", "close", "fail", "error"),
}
"""Members that the reference shows of classes that programs do not make: other members are for streams and engines."""

BARE = ("Conditions", "Faults", "Interference", "Virtual")
"""Classes of `overlap` that the reference shows by their docstrings alone: their methods are for engines."""

FIRST = ("run", "Rank", "Group", "Mesh", "Stream", "Future", "CollectiveFuture", "ComputeFuture", "connect")
"""Names with which the reference of `overlap` starts; errors and constants are the end of every page."""

NARROW_EM = {"76.25em": "68.75em", "76.234375em": "68.734375em"}
"""Width from which the theme shows its navigation, 1,220 pixels, and the one that the site has: 1,100."""

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
_TITLE = re.compile(r"^<!-- file: (\S+) -->\n\n```(\w+)$", re.M)

# -- the reference -----------------------------------------------------------------------------------------------


def public_names(package: Path) -> list[str]:
    """Return the names of a package's `__all__`, without importing it."""
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def packages() -> dict[str, list[str]]:
    """Return every package that has public names, with these."""
    found = {}
    for house in HOUSES:
        for path in sorted((ROOT / house).rglob("__init__.py")):
            if names := public_names(path):
                found[".".join(path.parent.relative_to(ROOT).parts)] = names
    return found


def page_of_package(package: str, names: list[str]) -> str:
    """Return the page of a package: its docstring, then each public name."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first, _, rest = told.partition("\n\n")
    code = f"\n\n```text\n{rest}\n```" if rest else ""
    return "\n\n".join([f"# {package}", first + code, *(_entry(package, name) for name in sorted(names, key=_order))])


def _order(name: str) -> tuple[int, bool, bool, str]:
    """Return the place of a name on a page of the reference."""
    start = FIRST.index(name) if name in FIRST else len(FIRST)
    return start, name.isupper(), name.endswith(("Error", "Warning")), name


def _entry(package: str, name: str) -> str:
    """Return the directive of a public name; of a class that programs do not make, with the members that they use."""
    if package == "overlap" and name in BARE:
        return f"::: {package}.{name}\n    options:\n      members: false"
    members = USED.get(f"{package}.{name}")
    if members is None:
        return f"::: {package}.{name}"
    return (
        f"::: {package}.{name}\n    options:\n      merge_init_into_class: false\n      members: [{', '.join(members)}]"
    )


def commands() -> dict[str, str]:
    """Return what each command prints for `--help-all`."""
    from overlap.cli import COMMANDS, main

    pages = {}
    for name in COMMANDS:
        printed = io.StringIO()
        with patch.dict(os.environ, COLUMNS="100"), contextlib.redirect_stdout(printed):
            main([name, "--help-all"])
        pages[name] = f"# overlap {name}\n\n```text\n{printed.getvalue()}```\n"
    return pages


def reference() -> Iterator[tuple[str, str, str]]:
    """Yield section, path and text of every page of the reference."""
    for package, names in packages().items():
        yield "Reference", f"reference/{package}.md", page_of_package(package, names)
    for name, text in commands().items():
        yield "Commands", f"reference/commands/{name}.md", text


# -- the first page ------------------------------------------------------------------------------------------------


def first_screen() -> str:
    """Return the README up to its installation, with the picture of the demo after its first program."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    picture = re.search(r"`overlap demo` looks.*?^```text$.*?^```$", readme, re.M | re.S)
    assert picture
    first, steps, _ = re.split(r"^(?=## )", readme, maxsplit=2, flags=re.M)
    return f"{first}{picture[0]}\n\n{steps}"


# -- files of the repository ---------------------------------------------------------------------------------------


def named_files() -> dict[str, str]:
    """Return a page for each file or folder outside of `docs` that a page names, by its path in the repository."""
    found, waiting = {}, sorted((ROOT / "docs").rglob("*.md"))
    while waiting:
        page = waiting.pop()
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            target = Path(normpath(page.parent / link))
            name = target.relative_to(ROOT).as_posix()
            if name.startswith("docs/") or name in found or not target.exists():
                continue
            found[name] = _shown(name, target)
            if target.suffix == ".md":
                waiting.append(target)
    return found


def _shown(name: str, path: Path) -> str:
    if path.is_dir():
        return "\n".join([f"# {name}\n", *(f"* `{each.name}`" for each in sorted(path.glob("[!_.]*")))])
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def page_of(name: str) -> str:
    """Return the path on the site of a file of the repository."""
    return name.removeprefix("docs/") if name.startswith("docs/") else f"repository/{name.removesuffix('.md')}.md"


# -- hooks of MkDocs -----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of the reference into the navigation."""
    sections: dict[str, list[str]] = {}
    for section, path, _ in reference():
        sections.setdefault(section, []).append(path)
    sections["Repository"] = [page_of(name) for name in sorted(named_files())]
    config.nav += [{section: pages} for section, pages in sections.items()]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages."""
    from mkdocs.structure.files import File

    for _, path, text in reference():
        files.append(File.generated(config, path, content=text))
    for name, text in named_files().items():
        files.append(File.generated(config, page_of(name), content=text))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links to files of the repository lead to their pages, and show the names of files above their text."""
    here = page.file.src_uri
    # A page lies elsewhere on the site than in the repository.
    origin = f"{here.removeprefix('repository/')}" if here.startswith("repository/") else f"docs/{here}"

    def moved(text: str, origin: str) -> str:
        def link(found: re.Match[str]) -> str:
            name = normpath(join(dirname(origin), found[1]))
            exists = (ROOT / name).exists() and not here.startswith("reference/")
            return f"]({relpath(page_of(name), dirname(here) or '.')}" if exists else found[0]

        return _LINK.sub(link, text)

    text = moved(markdown, origin)
    if here == "README.md":
        text = moved(first_screen(), "README.md") + text.replace("# Documentation", "## Documentation", 1)
    return _TITLE.sub(r'```\2 title="\1"', text)


def on_post_build(config: MkDocsConfig) -> None:
    """Show the navigation in narrower windows than the theme does."""
    assets = Path(config.site_dir) / "assets"
    changed = 0
    for path in [*assets.glob("stylesheets/*.css"), *assets.glob("javascripts/bundle*.js")]:
        text = path.read_text(encoding="utf-8")
        for theirs, ours in NARROW_EM.items():
            changed += text.count(theirs)
            text = text.replace(theirs, ours)
        path.write_text(text, encoding="utf-8")
    if not changed:
        raise SystemExit("docs/build.py: this version of mkdocs-material has other widths than NARROW_EM says")


# -- the command ---------------------------------------------------------------------------------------------------


def main() -> int:
    """Build the site into `site/`; return the exit code."""
    missing = [name for name in ("mkdocs", "material", "mkdocstrings") if importlib.util.find_spec(name) is None]
    if missing:
        from overlap.version import install_command

        print(f"the site needs {', '.join(missing)}: {install_command('docs')}", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
