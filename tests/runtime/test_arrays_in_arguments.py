"""Which arrays a compute is said to use: those that its arguments are or hold, at any depth."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

from overlap.runtime.memory.buffer_locks import arrays_in

Pair = namedtuple("Pair", "left right")
X, Y = np.ones(1), np.zeros(2)


@dataclass
class Record:
    """A dataclass is an object like any other."""

    x: object


class Odd(np.ndarray):
    """An array of another type."""


ODD, RECORD = np.ones(2).view(Odd), Record(X)


@pytest.mark.parametrize(
    ("args", "arrays", "others"),
    [
        ((), [], []),
        ((X,), [X], []),
        ((1, 2.5, "text", b"bytes", None, True, 1j, X, Y), [X, Y], []),
        (([X, [Y]],), [X, Y], []),
        (({"a": X, "b": (Y, 1)},), [X, Y], []),
        ((Pair(X, [Pair(1, Y)]),), [X, Y], []),
        ((OrderedDict(a=[X]),), [X], []),
        ((X, X), [X, X], []),
        ((ODD,), [ODD], []),
        ((RECORD, X), [X], [RECORD]),
        ((print,), [], [print]),
    ],
)
def test_what_is_found(args: tuple[object, ...], arrays: list[object], others: list[object]) -> None:
    found = arrays_in(args)
    assert list(map(id, found[0])) == list(map(id, arrays))
    assert list(map(id, found[1])) == list(map(id, others))


def test_what_holds_itself_is_looked_into_once() -> None:
    endless: list[object] = [X]
    endless.append(endless)
    assert arrays_in((endless, endless)) == ([X], [])


def test_ever_so_deep() -> None:
    deep: object = X
    for _ in range(5000):
        deep = [deep]
    assert arrays_in((deep,)) == ([X], [])
