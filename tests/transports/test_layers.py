"""The pure files of transports know no I/O; `tests/test_house.py` finds imports that lead back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import transports

ROOT = Path(transports.__file__).parent
FILES = {
    ".".join(("transports", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
PURE = [name for name in FILES if name.startswith("transports.matching")]
PURE += ["transports.frame", "transports.factory"]


def imports(name: str) -> Iterator[str]:
    """Every module that a file names, as far down as the name leads."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (one if one in FILES else node.module for one in inner)


@pytest.mark.parametrize("name", PURE)
def test_what_is_pure_waits_for_nothing(name: str) -> None:
    assert {one.partition(".")[0] for one in imports(name)} & {
        "trio",
        "socket",
        "asyncio",
        "threading",
        "mpi4py",
    } == set()
