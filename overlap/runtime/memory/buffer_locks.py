"""Arrays in flight are read-only until the last operation that uses them has ended."""

from __future__ import annotations

import dis
import threading
import weakref
from collections.abc import Iterable, Sequence
from traceback import walk_tb
from types import FrameType
from typing import Any

import numpy as np

from ...collectives.reduce import Array

_ONE, _WRITTEN = 2, 1


class BufferLocks:
    """The arrays of a world that are in use: the first user makes one read-only, the last one makes it writable again.

    Only the array object itself is guarded: other views of the same memory stay writable, numpy cannot reach them.
    Arrays that were read-only to begin with are left alone. The user of an array refers to it until it unlocks it.

    Locking and unlocking an array take 0.5 us each, however much is in flight. Any thread may do either: computes
    unlock in their rank's thread. One lock around a few dictionary operations makes that safe; it can be taken again by
    its holder, as the garbage collector may run anything in between.

    A view cannot become writable while its base is read-only: such views wait, as weak references, for the base.
    """

    __slots__ = ("_awaited", "_lock", "_users", "_waiting")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: dict[int, int] = {}  # by id of the array: number of users times `_ONE`, plus `_WRITTEN` if written
        self._waiting: dict[int, dict[int, weakref.ref[Array]]] = {}  # by ids of the base and of the view
        self._awaited: dict[int, int] = {}  # from the id of the view to that of the base

    def __len__(self) -> int:
        """Return how many arrays are in use."""
        return len(self._users)

    def lock(self, arrays: tuple[Array, ...], written: Array | None = None) -> tuple[Array, ...]:
        """Make arrays read-only, or count one more user of each; return the arrays that are to be unlocked.

        Args:
            arrays: Arrays that were read-only to begin with are left alone.
            written: The array that the user writes, through a view of its own; it has no other user.
        """
        users, held = self._users, arrays
        self._lock.acquire()  # `with` takes twice as long
        try:
            for array in arrays:
                key = id(array)
                if key in users:
                    users[key] += _ONE
                    continue
                if array.flags.writeable:
                    array.setflags(False)  # type: ignore[call-arg]  # by position: half the time
                elif not self._claim(array):
                    held = tuple(other for other in held if other is not array)
                    continue
                users[key] = _ONE if array is not written else _ONE | _WRITTEN
        finally:
            self._lock.release()
        return held

    def written(self, array: Array) -> bool:
        """Whether an operation in progress writes an array."""
        return self._users.get(id(array), 0) & _WRITTEN != 0

    def unlock(self, arrays: Iterable[Array]) -> None:
        """Remove a user from each array, and make those without users writable again."""
        users, waiting = self._users, self._waiting
        self._lock.acquire()
        try:
            for array in arrays:
                key = id(array)
                remaining = users.pop(key) - _ONE
                if remaining >= _ONE:
                    users[key] = remaining
                elif waiting:
                    self._make_writable(array)
                else:  # as `_make_writable` where nothing waits for the array
                    try:
                        array.setflags(True)  # type: ignore[call-arg]
                    except ValueError:
                        self._wait_for_base(array)
        finally:
            self._lock.release()

    def follow(self, views: Iterable[Array], arrays: Iterable[Array]) -> None:
        """Make views of locked arrays, which are read-only because of that, writable together with them."""
        users, owners = self._users, None
        with self._lock:
            for view in views:
                if view.flags.writeable or id(view) in users:
                    continue
                if owners is None:
                    owners = {id(_owner(array)): array for array in arrays}
                array = owners.get(id(_owner(view)))
                if array is not None:
                    self._wait(view, array)

    # -- below: with the lock held ---------------------------------------------------------------------------------

    def _make_writable(self, array: Array) -> None:
        """Make an array writable, and views that waited for it; wait for its own base if necessary."""
        try:
            array.setflags(True)  # type: ignore[call-arg]
        except ValueError:
            self._wait_for_base(array)
        for key, reference in self._waiting.pop(id(array), {}).items():
            del self._awaited[key]
            view = reference()
            if view is not None:
                self._make_writable(view)

    def _wait_for_base(self, view: Array) -> None:
        """Let a view wait until its locked base is writable."""
        base = self._locked_base(view)
        if base is not None:  # else the program made its base read-only
            self._wait(view, base)

    def _wait(self, view: Array, array: Array) -> None:
        """Let a view wait for an array."""
        self._forget(id(view))  # a view that is gone may have had this id
        self._awaited[id(view)] = id(array)
        self._waiting.setdefault(id(array), {})[id(view)] = weakref.ref(view)

    def _claim(self, view: Array) -> bool:
        """Remove an array from the views that wait for a base; False if it was read-only to begin with."""
        reference = self._forget(id(view))
        return reference is not None and reference() is view

    def _forget(self, key: int) -> weakref.ref[Array] | None:
        """Remove a view from the views that wait; return its reference if it was one."""
        awaited = self._awaited.pop(key, None)
        return None if awaited is None else self._waiting[awaited].pop(key)

    def _locked_base(self, array: Array) -> Array | None:
        """Return the locked array that an array is a view of, if any."""
        base = array.base
        while isinstance(base, np.ndarray):
            if id(base) in self._users:
                return base
            base = base.base
        return None


def _owner(array: Array) -> object:
    """Return the owner of an array's memory."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


_READ_ONLY = (
    "arrays that are passed to rank.compute are read-only until it is done, for the function too, since others may "
    "read them: {}return the new value, or write into a copy"
)

UNFINISHED = "arrays that an operation works on are read-only until it is done: {}await it first, or write into a copy"

_ndarray = np.ndarray
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None)})


def arrays_in(args: tuple[object, ...]) -> tuple[list[Array], list[object]]:
    """Return the arrays among `args`, and all other objects but plain numbers and text.

    Tuples (named ones too), lists and the values of dicts are searched, at any depth; each of them once. Objects of
    other types, dataclasses among them, are not: arrays that a function reaches through an object or a closure are the
    program's to guard.

    Cost: 0.3 us for plain arguments, 20 us for a dict of 100.
    """
    arrays: list[Array] = []
    for item in args:
        if type(item) is _ndarray:
            arrays.append(item)
        elif type(item) not in _PLAIN:
            return _search(args)
    return arrays, []


def _search(args: tuple[object, ...]) -> tuple[list[Array], list[object]]:
    """Return the arrays, and the objects of other types, in nested arguments."""
    arrays: list[Array] = []
    objects: list[object] = []
    items, seen = list(args), set[int]()
    for item in items:  # which grows
        if isinstance(item, _ndarray):
            arrays.append(item)
        elif type(item) in _PLAIN:
            continue
        elif not isinstance(item, (tuple, list, dict)):
            objects.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            items.extend(item.values() if isinstance(item, dict) else item)
    return arrays, objects


def explain(error: BaseException, operations: Sequence[Any], advice: str = _READ_ONLY) -> None:
    """Add a note to the error of a function, or of a program, that has tried to write into arrays in flight.

    Args:
        error: Of the function.
        operations: Unfinished operations, `IssuedFuture`. The note names those that hold an array of the line that has
            failed: numpy does not say which array it was.
        advice: Text of the note, with a place for these names.
    """
    if operations and isinstance(error, ValueError) and "read-only" in str(error) and not hasattr(error, "__notes__"):
        error.add_note(advice.format(_holders_text(error, operations)))


def _holders_text(error: BaseException, operations: Sequence[Any]) -> str:
    """Name operations that hold a read-only array of the line that has failed; "" without one."""
    points = list(walk_tb(error.__traceback__))
    while points and str(points[-1][0].f_globals.get("__name__")).startswith("numpy."):
        points.pop()
    arrays, objects = arrays_in(tuple(_values_in_line(*points[-1]))) if points else ([], [])
    arrays += arrays_in(tuple(value for each in objects for value in getattr(each, "__dict__", {}).values()))[0]
    guarded = [array for array in arrays if not array.flags.writeable]
    holders = [
        f"{operation.label} ({operation.call_site})"
        for operation in operations
        if any(np.may_share_memory(held, array) for held in getattr(operation, "locked", ()) for array in guarded)
    ]
    return f"this one is held by {' and '.join(holders)}; " if holders else ""


def _values_in_line(frame: FrameType, line: int) -> list[object]:
    """Return the values of variables that a line of a function uses."""
    uses = [use.argval for use in dis.get_instructions(frame.f_code) if use.positions and use.positions.lineno == line]
    names = {name for use in uses for name in (use if isinstance(use, tuple) else (use,))}
    return [value for name, value in {**frame.f_globals, **frame.f_locals}.items() if name in names]
