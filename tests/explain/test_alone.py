"""No other part of the package judges lost time, words it, or has a table of its causes."""

import ast
from pathlib import Path

import pytest

from overlap.explain import causes
from tests.waits.test_alone import texts

ROOT = Path(__file__).parents[2] / "overlap"
WORDED = {
    ", exposed ": {"explain/judgement.py"},
    " on the longest of ": {"explain/judgement.py"},
    "; try: ": {"explain/judgement.py", "cli/demo/report.py"},  # the demo leaves the change out
    "its program, before ": {"explain/ranks.py"},
    "wait or wire cannot be told": {"explain/judgement.py"},
    " if the rest stays": {"explain/judgement.py", "explain/bounds.py", "explain/advice.py"},
}
"""Parts of the sentence, and the files that have them."""
NAMES = frozenset(causes.NAMES)
MANY = 4
"""Causes that make a table."""
TABLES = {"explain/causes.py", "timeline/draw/folding.py"}  # the second has the fields of `Breakdown`, as columns


def read(root):
    """Return the phrases of the sentence, the tables of causes, and the judges in the files below a folder."""
    worded, tables, judges = {}, set(), set()
    for path in root.rglob("*.py"):
        name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        for text in texts(tree):
            for phrase in WORDED:
                if phrase in text:
                    worded.setdefault(phrase, set()).add(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict | ast.Tuple | ast.Set | ast.List):
                parts = [*node.keys] if isinstance(node, ast.Dict) else node.elts
                found = {part.value for part in parts if isinstance(part, ast.Constant)}
                if len(found & NAMES) >= MANY:
                    tables.add(name)
            if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "Why":
                judges.add(f"{name}:{node.name}")
    return worded, tables, judges


JUDGES = {
    "explain/judgement.py:explain_facts", "explain/recorded.py:explain_timeline",
    "explain/profiles.py:explain_profiles", "explain/entry.py:why", "explain/entry.py:explain_files",
    "explain/report.py:from_json",
}  # fmt: skip
"""The one judge, and the functions that give it a timeline, profiles or files."""


def test_lost_time_is_judged_and_worded_in_one_place():
    worded, tables, judges = read(ROOT)
    assert worded == WORDED
    assert tables == TABLES
    assert judges == JUDGES


@pytest.mark.parametrize(
    ("planted", "at"),
    [
        ('def text(ns):\n    return f"compute {ns}, exposed {ns}"\n', 0),
        ('CAUSES = {"compute": 1, "wire": 2, "waiting": 3, "queue": 4}\n', 1),
        ("def judge(rows) -> Why:\n    return Why()\n", 2),
    ],
)
def test_another_one_is_found(tmp_path, planted, at):
    (tmp_path / "second.py").write_text(planted)
    found = read(tmp_path)
    assert "second.py" in str(found[at])
