"""No other part of the package judges waits, or words them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "overlap"
PHRASES = (
    "waits for itself", "cannot go on", "may yet go on", " not come: ", " skipped ",
    "without the other end of", "in the other order", "has no record here", "no rank waits for another",
    "waits for its input; ", "keeps its event loop busy",
)  # fmt: skip
READERS = {
    "explain/hang.py", "flight/ends.py", "runtime/blame/stall.py", "runtime/blame/views.py", "testing/judging.py",
    "waits/wording.py",
}  # fmt: skip


def texts(tree: ast.Module) -> list[str]:
    """Return the texts in a file but for docstrings."""
    with_docstrings = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, with_docstrings)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in constants if id(node) not in docstrings]


def test_waits_are_worded_in_one_file_and_judged_by_one_function() -> None:
    worded: dict[str, set[str]] = {}
    judged = set()
    for path in ROOT.rglob("*.py"):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        found = {phrase for phrase in PHRASES for text in texts(tree) if phrase in text}
        if found:
            worded[name] = found
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        of_judge = any((node.module or "").endswith("waits.judge") for node in imported)
        of_waits = any(
            (node.module or "").endswith("waits") and "judge" in [a.name for a in node.names] for node in imported
        )
        if of_judge or of_waits or (name.startswith("waits/") and any(node.module == "judge" for node in imported)):
            judged.add(name)
    assert set(worded) == {"waits/wording.py"}, worded
    assert judged == READERS
