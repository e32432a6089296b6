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
"""Global name of the rank's set type in a program that `compile_program` has compiled."""

_COMBINING = (
    "__and__", "__or__", "__sub__", "__xor__", "__rand__", "__ror__", "__rsub__", "__rxor__", "union", "intersection",
    "difference", "symmetric_difference", "copy",
)  # fmt: skip


def make_set_type(seed: int, rank: int) -> type[set[Any]]:
    """Return the type of sets of one rank, whose order of strings depends on seed and rank; `set` with seed 0."""
    if seed == 0:
        return set

    class SetOfRank(set[Any]):
        """A set that iterates over strings in the order of this rank."""

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
        setattr(SetOfRank, name, _make_set_operator(name, SetOfRank))
    return SetOfRank


def _make_set_operator(name: str, kind: type[set[Any]]) -> Any:
    """Return the method `name` of `set`, whose result is converted to the type `kind`."""
    original = getattr(set, name)

    def combine(self: set[Any], *others: Iterable[Any]) -> Any:
        result = original(self, *others)
        return result if result is NotImplemented else kind(result)

    return combine


def compile_program(source: bytes, file: str) -> CodeType:
    """Compile a program whose set literals and comprehensions call the type in the global `NAME`."""
    tree = ast.parse(source, file)
    return compile(ast.fix_missing_locations(_Sets().visit(tree)), file, "exec")


class _Sets(ast.NodeTransformer):
    """Replaces set literals and comprehensions in a program by calls of the rank's set type."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        """Replace a literal: {1, 2} becomes NAME([1, 2])."""
        self.generic_visit(node)
        return _call_set_type(node, ast.List(elts=node.elts, ctx=ast.Load()))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        """Replace a comprehension: {f(x) for x in y} becomes NAME(f(x) for x in y)."""
        self.generic_visit(node)
        return _call_set_type(node, ast.GeneratorExp(elt=node.elt, generators=node.generators))


def _call_set_type(node: ast.expr, argument: ast.expr) -> ast.AST:
    """Return the call NAME(argument), with the line numbers of a node."""
    name = ast.Name(id=NAME, ctx=ast.Load())
    return ast.copy_location(ast.Call(func=name, args=[ast.copy_location(argument, node)], keywords=[]), node)
