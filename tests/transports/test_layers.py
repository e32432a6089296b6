"""The files of transports stand in layers: no import leads back, for no type checker either; the pure know no I/O."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
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


def test_no_import_leads_back() -> None:
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}  # they only collect what is below
    graph = {name: {one for one in imports(name) if one in FILES} for name in FILES if name not in packages}
    order = list(TopologicalSorter(graph).static_order())
    assert order.index("transports.base") < order.index("transports.efa.rail") < order.index("transports.efa.efa_link")


@pytest.mark.parametrize("name", PURE)
def test_what_is_pure_waits_for_nothing(name: str) -> None:
    assert {one.partition(".")[0] for one in imports(name)} & {
        "trio",
        "socket",
        "asyncio",
        "threading",
        "mpi4py",
    } == set()
