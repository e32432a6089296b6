"""Sets of strings with another order on each rank, as in separate processes.

Each process of Python hashes strings by a seed of its own, so a loop over a set of names takes another order in each.
The ranks of a test share one process; with a seed other than 0, the sets that a program makes behave as in processes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from xxhash import xxh64_intdigest

NAME = "__set_of_rank__"
"""The name by which changed programs find the type of sets."""

_COMBINING = (
    "__and__", "__or__", "__sub__", "__xor__", "__rand__", "__ror__", "__rsub__", "__rxor__", "union", "intersection",
    "difference", "symmetric_difference", "copy",
)  # fmt: skip


def make_set_type(seed: int, rank: int) -> type[set[Any]]:
    """Return the type of sets of one rank."""
    if seed == 0:
        return set

    class SetOfRank(set[Any]):
        """A set in the order of this rank."""

        __slots__ = ()

        def __iter__(self) -> Iterator[Any]:
            elements = list(super().__iter__())
            if elements and all(isinstance(element, str) for element in elements):
                elements.sort(key=lambda element: xxh64_intdigest(f"{seed}, {rank}, {element}".encode()))
            return iter(elements)

        def pop(self) -> Any:
            """Remove the first element, and return it."""
            for element in self:
                self.remove(element)
                return element
            raise KeyError("pop from an empty set")

    for name in _COMBINING:
        setattr(SetOfRank, name, _set_operator(name, SetOfRank))
    return SetOfRank


def _set_operator(name: str, kind: type[set[Any]]) -> Any:
    """Return a method of `set` with results of the rank's type of sets."""
    original = getattr(set, name)

    def combine(self: set[Any], *others: Iterable[Any]) -> Any:
        result = original(self, *others)
        return result if result is NotImplemented else kind(result)

    return combine


def compile_program(source: bytes, file: str) -> CodeType:
    """Compile a program, with its literals and comprehensions of sets as the set type of the rank."""
    tree = ast.parse(source, file)
    return compile(ast.fix_missing_locations(_Sets().visit(tree)), file, "exec")


class _Sets(ast.NodeTransformer):
    def visit_Set(self, node: ast.Set) -> ast.AST:
        """Replace a literal by a call of the rank's set type."""
        self.generic_visit(node)
        return _call_set_type(node, ast.List(elts=node.elts, ctx=ast.Load()))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        """Replace a comprehension by a call of the rank's set type."""
        self.generic_visit(node)
        return _call_set_type(node, ast.GeneratorExp(elt=node.elt, generators=node.generators))


def _call_set_type(node: ast.expr, argument: ast.expr) -> ast.AST:
    """Return the call of the rank's set type with an argument, at the place of a node."""
    name = ast.Name(id=NAME, ctx=ast.Load())
    return ast.copy_location(ast.Call(func=name, args=[ast.copy_location(argument, node)], keywords=[]), node)
