"""Print the code lines of each package beside its budget; exit 1 if one is above. Usage: weight.py

A code line has code: docstrings, comments and blank lines are free. C counts with all its lines. Whoever needs more
lines changes BUDGETS, in a commit that says why. No docstring is deleted, no lines are joined, and no code is hidden in
data to meet a budget.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

BUDGETS = {
    "examples": 1_380,
    "native": 3_522,
    "overlap/*.py": 1_856,
    "overlap/cli": 3_480,
    "overlap/collectives": 3_095,
    "overlap/cost": 2_274,
    "overlap/data": 29,
    "overlap/embedded": 480,
    "overlap/explain": 2_404,
    "overlap/flight": 1_110,
    "overlap/launch": 1_039,
    "overlap/parallel": 3_847,
    "overlap/processes": 2_763,
    "overlap/ray": 621,
    "overlap/runtime": 10_489,
    "overlap/simulation": 2_365,
    "overlap/state": 548,
    "overlap/survival": 601,
    "overlap/testing": 4_209,
    "overlap/timeline": 3_001,
    "overlap/torch": 1_671,
    "overlap/waits": 780,
    "product": 56_097,
    "tests": 66_496,
    "topology": 1_812,
    "transports/*.py": 3_073,
    "transports/efa": 1_347,
    "transports/matching": 773,
    "transports/shared_memory": 1_050,
}

_ROOT = Path(__file__).parents[1]
_FREE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(path: Path) -> int:
    """Return the number of lines of a Python file with a token outside of comments and docstrings."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    bodies = [body for node in nodes if isinstance(body := getattr(node, "body", None), list)]
    docstrings = {
        line
        for statement in (statement for body in bodies for statement in body)
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _FREE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def package(path: Path) -> str:
    """Return the row of a file: its folder in overlap/ or transports/, or its top-level folder."""
    top, *inner = path.relative_to(_ROOT).parts
    if top not in ("overlap", "transports"):
        return top
    return f"{top}/{inner[0]}" if len(inner) > 1 else f"{top}/*.py"


def main() -> int:
    """Print the table and return the exit code."""
    counts: defaultdict[str, int] = defaultdict(int)
    for top in ("overlap", "transports", "topology", "examples", "tests"):
        for path in (_ROOT / top).rglob("*.py"):
            counts[package(path)] += code_lines(path)
    for path in (_ROOT / "transports").rglob("*.[ch]"):
        counts["native"] += len(path.read_text().splitlines())
    counts["product"] = sum(count for name, count in counts.items() if name not in ("tests", "native"))
    above = []
    for name, count in sorted(counts.items()):
        budget = BUDGETS.get(name, 0)
        above += [name] * (count > budget)
        print(f"{name:26} {count:7,}  budget {budget:7,}{f'  above by {count - budget:,}' if count > budget else ''}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
