"""Errors for a program that uses a future as if it were its value: they ask to await the future first."""

from __future__ import annotations

from collections.abc import Generator
from numbers import Number
from typing import TYPE_CHECKING, NoReturn

import numpy as np

_VALUES = (Number, np.generic, np.ndarray)
_FIRST = "await it first, or pass it to rank.compute or a collective"


class NotAValue:
    """Base class of futures that raises an error if one is iterated, tested for truth, compared or computed with."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"a future cannot be formatted as {spec!r}; {_FIRST}")
        return str(self)

    def __iter__(self) -> Generator[object, None, None]:
        raise TypeError("a future cannot be iterated; await it, or take items by index")

    def __bool__(self) -> bool:
        raise TypeError("a future is neither true nor false; await it first, or ask for its `done`")

    def __array__(self, *_: object, **__: object) -> object:
        raise TypeError(f"a future is no array yet; {_FIRST}")

    if not TYPE_CHECKING:  # type checkers would accept arithmetic with futures

        def _refuse(self, *_: object) -> NoReturn:
            raise TypeError(f"a future cannot be computed with; {_FIRST}")

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __divmod__ = __rdivmod__ = __invert__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __float__ = __int__ = __round__ = _refuse
        __contains__ = __setitem__ = __delitem__ = _refuse

        def __eq__(self, other: object) -> bool:
            if isinstance(other, _VALUES):  # with any other object: compared by identity
                raise TypeError(f"a future cannot be compared with {type(other).__name__}; {_FIRST}")
            return NotImplemented

        __hash__ = object.__hash__

        def __len__(self) -> int:
            raise TypeError(f"a future has no length; {_FIRST}")


def _refusing_property(name: str) -> property:
    """Return a property that raises `AttributeError`, for an attribute that values have, such as `shape`."""

    def refuse(future: object) -> NoReturn:
        raise AttributeError(f"a future has no {name!r}; {_FIRST}", name=name, obj=future)

    return property(refuse, doc="An attribute of the value, not of the future.")


# One property for each name: in a class with `__getattr__`, every other attribute takes five times as long to read.
for _name in {*dir(np.ndarray), *dir(dict), *dir(list)}:
    if not _name.startswith("_"):
        setattr(NotAValue, _name, _refusing_property(_name))
