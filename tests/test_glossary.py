"""The glossary is kept: one name for a class, and in no name, page or message a word that it excludes."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
PUBLIC_TWICE = {"DataParallel", "Sharded"}  # one of the two is public


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of the product."""
    files = [path for top in ("overlap", "transports", "topology") for path in (ROOT / top).rglob("*.py")]
    return {path: ast.parse(path.read_bytes()) for path in files}


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of the table under a line that begins so."""
    lines = GLOSSARY[GLOSSARY.index(heading) :].splitlines()
    table = takewhile(lambda line: line.startswith("|"), lines[2:])
    yield from ([cell.strip() for cell in line.strip("|").split("|")] for line in table)


def excluded(heading: str) -> list[str]:
    return [word.strip() for *_, cell in rows(heading) for word in cell.split(",") if word.strip()]


@cache
def names() -> dict[str, str]:
    """Return the names of functions, classes, arguments, variables and attributes, by file and name."""
    found = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    pass
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case _:
                    continue
            found[f"{path.relative_to(ROOT)}: {name}"] = name
    return found


@cache
def parts(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def named(word: str) -> list[str]:
    """Return the names with a word, or with a prefix such as `note_`, and their files."""
    if word.endswith("_"):
        return [where for where, name in names().items() if name.lstrip("_").startswith(word)]
    return [where for where, name in names().items() if word in parts(name)]


def test_no_name_has_a_word_that_the_glossary_excludes() -> None:
    words = excluded("| act | verb | noun | in no name |")
    assert len(words) > 20
    assert {word: found for word in words if (found := named(word))} == {}


@cache
def texts() -> dict[str, str]:
    """Return pages, and the texts of messages: strings of the product with a blank, but for docstrings."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = {str(path.relative_to(ROOT)): path.read_text() for path in pages if path.name != "glossary.md"}
    found.pop("CHANGELOG.md")
    for path, tree in trees().items():
        bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
        free = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in free]
        words = [node.value for node in strings if isinstance(node.value, str) and " " in node.value]
        found[str(path.relative_to(ROOT))] = "\n".join(words)
    return found


def test_no_page_or_message_has_a_word_that_the_glossary_excludes() -> None:
    words = excluded("| use | not |")
    assert len(words) > 10
    patterns = {word: re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE) for word in words}
    found = {word: [where for where, text in texts().items() if patterns[word].search(text)] for word in words}
    assert {word: where for word, where in found.items() if where} == {}


def test_a_word_stands_once_in_the_glossary() -> None:
    defined: list[str] = []
    for table in GLOSSARY.split("| word | meaning |\n")[1:]:
        lines = takewhile(lambda line: line.startswith("|"), table.splitlines()[1:])
        defined += [word.strip() for line in lines for word in line.split("|")[1].split(",")]
    assert sorted({word for word in defined if defined.count(word) > 1}) == []


def test_a_class_name_stands_once() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in PUBLIC_TWICE} == {}


def test_a_stage_is_a_part_of_a_pipeline() -> None:
    assert [where for where in named("stage") + named("stages") if not where.startswith("overlap/parallel/")] == []
