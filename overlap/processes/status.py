"""The status record: how a process tells its launcher why it ends, and whether that is its own fault.

Exit codes cannot say that: a process whose peer has failed ends with an error too, often earlier than the one at fault.
So each process gets the writing end of a pipe, in `OVERLAP_STATUS_FD`, and writes at its end at most one line of JSON
into it, of any length that an error may have, because the launcher reads while it is written::

    {"cause": false, "rank": 5, "line": "rank 5 failed at train.py:41: ValueError", "text": "Traceback ...", "code": 1}

`cause` is whether the error began here, `rank` who is at fault as far as is known (or null), `line` the error in one
line, `text` all that a reader of the terminal should see. `code` is the exit code that it is about to end with: giving
memory and threads back takes time, for which its launcher may not wait. A process that ends badly without a record
(killed, or `os._exit`) counts as a cause.

Before that it says of each world that it enters, counted from 1, that it waits for the others and that they are there::

    {"world": 1, "joined": false}

A process that has ended well without having come to a world in which another waits is not coming. At the end of the
world, however it ends, it says so too; one that exits with code 0 without that has vanished, as `os._exit` does::

    {"left": 1}

And it says whom the others have given up, by node; one that is stopped would otherwise live until the launcher's
patience is over::

    {"lost": 1}
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeAlias

from transports import LinkLostError, TransportError

from ..errors import PeerError, RankFailedError, RemoteError

# Of a text, in characters: far more than any error tells, and what the launcher can hold of all its processes.
LONGEST_TEXT = 2 << 20
LONGEST_LINE = 1000
LONGEST_BYTES = 6 * LONGEST_TEXT + 16 * 1024  # of a record: JSON makes at most 6 bytes of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Why a process ends."""

    cause: bool  # Whether the error began in this process
    rank: int | None = None  # World rank at fault, if it is known
    line: str = ""  # The error in one line
    text: str = ""  # What a reader of the terminal should see; may have many lines, and may be empty
    code: int = 1  # The exit code that the process is about to end with


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    """Where a process stands that enters a world."""

    world: int  # Which of its worlds, counted from 1
    joined: bool  # Whether all have come; False: it waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """That a process is done with a world, which may have failed."""

    left: int  # Which of its worlds, counted from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Losing:
    """That another process has gone without a goodbye, or counts as gone."""

    lost: int  # Its node


Record: TypeAlias = Status | Entering | Leaving | Losing


def status_of(error: BaseException, *, local: Container[int], text: str = "", code: int = 1) -> Status:
    """Judge the error that ends this process.

    Args:
        error: What its program raised.
        local: The world ranks that it hosts.
        text: What it would print.
        code: The exit code that follows.
    """
    line = str(error).split("\n", 1)[0] or type(error).__name__
    if isinstance(error, RankFailedError):
        # A lost connection is how the end of another process is first seen, whoever notices.
        remote = isinstance(error.cause, (RemoteError, PeerError, TransportError))
        remote = remote and not (isinstance(error.cause, LinkLostError) and error.cause.evident)
        return Status(cause=error.rank in local and not remote, rank=error.rank, line=line, text=text, code=code)
    if isinstance(error, PeerError):
        known = error.culprit if error.culprit >= 0 else None
        return Status(cause=False, rank=known, line=line, text=text, code=code)
    return Status(cause=not isinstance(error, TransportError), line=line, text=text, code=code)


def tell_launcher(record: Record, environ: Mapping[str, str] = os.environ) -> bool:
    """Write a record to the launcher, which reads meanwhile; return whether there is one that listens."""
    told = asdict(record)
    if isinstance(record, Status):
        told |= {"line": record.line[:LONGEST_LINE], "text": _shortened(record.text)}
    left = memoryview(json.dumps(told).encode() + b"\n")
    with suppress(KeyError, ValueError, OSError):
        descriptor = int(environ["OVERLAP_STATUS_FD"])
        while left:
            left = left[os.write(descriptor, left) :]
        return True
    return False


def read_record(data: bytes) -> Record | None:
    """Return the record that a process has written, or None if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match record:
        case {
            "cause": bool(cause),
            "rank": int() | None as rank,
            "line": str(line),
            "text": str(text),
            "code": int(code),
        }:
            return Status(cause=cause, rank=rank, line=line, text=text, code=code)
        case {"world": int(world), "joined": bool(joined)}:
            return Entering(world=world, joined=joined)
        case {"left": int(left)}:
            return Leaving(left=left)
        case {"lost": int(lost)}:
            return Losing(lost=lost)
    return None


def _shortened(text: str) -> str:
    """Keep the beginning and the end: the one tells what went wrong and where, the other who is at fault."""
    left_out = len(text) - LONGEST_TEXT
    if left_out <= 0:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n  ... {left_out} characters left out ...\n{text[-half:]}"
