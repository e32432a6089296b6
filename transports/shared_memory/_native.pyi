from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

INTERFACE: int

_Way = tuple[memoryview, memoryview, memoryview] | tuple[memoryview, memoryview, memoryview, int]

class Op:
    state: int
    met: bool
    queued: bool
    source: int
    theirs: tuple[int, bytes, int]

class Run:
    state: int
    queued: bool
    ended_ns: int
    home: int
    position: int

_Seats = list[tuple[memoryview, memoryview, int, int]]

class Board:
    def __init__(self, engine: Engine, seats: _Seats, reads: bool, /) -> None: ...
    def lose(self) -> None: ...
    def add_place(self, where: int, nbytes: int, /) -> None: ...
    def row(self, position: int, number: int, /) -> tuple[int, int, int, bytes]: ...
    def take_places(self, every: bool, /) -> list[int]: ...

_Pulls = list[tuple[int, int, list[tuple[int, int]]]]

class Table:
    def __init__(
        self,
        position: int,
        size: int,
        active: int,
        flags: int,
        nbytes: int,
        result_bytes: int,
        unread: tuple[int, int],
        needed: bytes,
        take: _Pulls,
        reduce: _Pulls,
        collect: _Pulls,
        reducer: tuple[object, object, int, int, bytes, int] | None,
        /,
    ) -> None: ...

class Engine:
    def __init__(
        self,
        bells: memoryview,
        peers: Sequence[_Way | None],
        look_s: float,
        door: int = -1,
        most: int = 1,
        yields: bool = False,
        cores: int = 1,
        /,
    ) -> None: ...
    def send(
        self,
        peer: int,
        tag: int,
        fingerprint: int,
        text: bytes,
        address: int | None,
        nbytes: int,
        keeps: object,
        lane: int = 0,
        priority: int = 0,
        owner: object = ...,
        /,
    ) -> Op: ...
    def receive(
        self,
        peer: int,
        tag: int,
        fingerprint: int,
        text: bytes,
        address: int | None,
        nbytes: int,
        keeps: object,
        lane: int = 0,
        owner: object = ...,
        /,
    ) -> Op: ...
    def accept(self, op: Op, address: int | None, keeps: object, owner: object = ..., /) -> Op: ...
    def note(self, peer: int, first: int, second: int, third: int, owner: object = ..., /) -> Op: ...
    def probe(self, on: bool, /) -> None: ...
    def announced(self, rank: int, /) -> list[tuple[int, int, int, int, int, int, bytes]]: ...
    def submit(
        self,
        board: Board,
        table: Table,
        owner: object,
        number: int,
        tag: int,
        source: int,
        target: int,
        priority: int,
        home: int,
        how: int,
        fingerprint: int = 0,
        text: bytes = b"",
        /,
    ) -> Run | None: ...
    def wait(self, end: Op | Run, seconds: float, look_s: float = ..., /) -> int: ...
    def loop(self, awake: bool, /) -> None: ...
    def promise(self) -> None: ...
    def cancel(self, run: Run, /) -> bool: ...
    def forget(self, end: Op | Run, /) -> None: ...
    def take_ended(self) -> tuple[list[object], list[tuple[int, int, int, int]]]: ...
    def withdraw(self, op: Op, /) -> bool: ...
    def lose(self, peer: int, /) -> None: ...
    def close(self) -> None: ...

def address_of(array: NDArray[Any], /) -> int: ...
def copy_uncached(target: NDArray[Any], source: NDArray[Any], /) -> None: ...
