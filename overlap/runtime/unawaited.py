"""What a future says to a program that takes it for its value: to await it first."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, NoReturn

import numpy as np

_FIRST = "await it first, or pass it to rank.compute or a collective"


class Unawaited:
    """Refuses what only a value can do; `==` compares futures."""

    __slots__ = ()

    def __iter__(self) -> Generator[object, None, None]:
        raise TypeError("a future cannot be iterated; await it, or take items by index")

    def __bool__(self) -> bool:
        raise TypeError("a future is neither true nor false; await it first, or ask for its `done`")

    def __array__(self, *_: object, **__: object) -> object:
        raise TypeError(f"a future is no array yet; {_FIRST}")

    if not TYPE_CHECKING:  # which would believe that a future can be computed with

        def _refuse(self, *_: object) -> NoReturn:
            raise TypeError(f"a future cannot be computed with; {_FIRST}")

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __float__ = __int__ = _refuse


def _missing(name: str) -> property:
    """Return what stands for an attribute of values, and says so."""

    def refuse(future: Unawaited) -> NoReturn:
        raise AttributeError(f"a future has no {name!r}; {_FIRST}", name=name, obj=future)

    return property(refuse, doc="What only the value has.")


# Name by name: of a class that has `__getattr__`, every other attribute takes five times as long to read.
for _name in {*dir(np.ndarray), *dir(dict), *dir(list)}:
    if not _name.startswith("_"):
        setattr(Unawaited, _name, _missing(_name))
