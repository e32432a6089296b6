"""Status records: a process reports to its launcher why it ends, and whether that is its own fault.

Exit codes are not enough: a process whose peer has failed ends with an error, too, and often before the process at
fault. So each process gets the writing end of a pipe, in `OVERLAP_STATUS_FD`, and writes records into it. A record is a
line of JSON: its name and its fields. A `Status` is the last record. It may be as long as an error, because the
launcher reads concurrently. A process that fails without a status (killed, or by `os._exit`) counts as a cause.

For each world, a process reports that it waits for the others (`Entering`), that all have joined (`Entering` again),
and the end of the world (`Leaving`). So the launcher finds a process that has ended well although another one waits for
it to join, and a process that exits with code 0 in the middle of a world, as by `os._exit`. Each `MemberLost` is passed
on, too, so that the launcher kills a stopped process at once.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from contextlib import suppress
from typing import TypeAlias

import msgspec

from transports import LinkLostError, TransportError

from ..errors import PeerError, RankFailedError, RemoteError, shorten_line
from ..waits.signs import Evidence
from .wire import MemberLost, Tagged, escape_surrogates

# Longest text, in characters: longer than any error, and short enough for the launcher to store it for each process.
LONGEST_TEXT = 2 << 20
LONGEST_LINE = 1000
LONGEST_BYTES = 6 * LONGEST_TEXT + 16 * 1024  # longest record: JSON has at most 6 bytes for a character


class Status(Tagged):
    """Why a process ends."""

    cause: bool  # Whether the error began in this process
    rank: int | None = None  # World rank at fault, if it is known
    line: str = ""  # The error in one line
    text: str = ""  # The report for the terminal, of any number of lines; may be empty
    code: int = 1  # The exit code with which the process will end; it still has to free memory and threads

    @property
    def evidence(self) -> Evidence:
        """Evidence that the process is at fault."""
        return Evidence.OWN_ERROR if self.cause else Evidence.REPORTED


class Entering(Tagged):
    """A process enters a world."""

    world: int  # Number of the world in this process, from 1
    joined: bool  # Whether all processes have joined; False: this one waits for them
    ranks_each: int = 0  # Ranks of each process; 0: not reported


class Leaving(Tagged):
    """A process has left a world, which may have failed."""

    world: int  # Number of the world in this process, from 1


Record: TypeAlias = Status | Entering | Leaving | MemberLost
_RECORDS: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def status_from_error(error: BaseException, *, local: Container[int], text: str = "", code: int = 1) -> Status:
    """Return the status record for the error that ends this process.

    Args:
        error: The error that the program raised. If it was raised because of a failure of another process, that failure
            decides on the cause and the rank.
        local: The world ranks of this process.
        text: The report that is printed for the error.
        code: The exit code that follows.
    """
    line = str(error).split("\n", 1)[0] or type(error).__name__
    # the error that came before: of torch's `DistBackendError`, or of an error raised in an `except` block
    before = error.__cause__ or error.__context__  # the context is kept even after `from None`
    if not isinstance(error, RankFailedError) and isinstance(before, (PeerError, RankFailedError)):
        error = before
    # a broken wire is the consequence of an end elsewhere
    cause, rank = not isinstance(error, TransportError), None
    if isinstance(error, RankFailedError):
        # the end of another process is seen first as a lost connection, which is no evidence against this one
        is_evident = isinstance(error.cause, LinkLostError) and error.cause.evident
        is_remote = isinstance(error.cause, (RemoteError, PeerError, TransportError)) and not is_evident
        cause, rank = error.rank in local and not is_remote, error.rank
    elif isinstance(error, PeerError):
        cause, rank = False, error.culprit if error.culprit >= 0 else None
    return Status(cause=cause, rank=rank, line=line, text=text, code=code)


def report_to_launcher(record: Record, environ: Mapping[str, str] = os.environ) -> bool:
    """Write a record to the launcher, which reads concurrently; return whether there is a launcher."""
    if isinstance(record, Status):
        text = shorten_line(record.text, LONGEST_TEXT)
        record = escape_surrogates(msgspec.structs.replace(record, line=record.line[:LONGEST_LINE], text=text))
    unsent = memoryview(msgspec.json.encode(record) + b"\n")
    with suppress(KeyError, ValueError, OSError):
        descriptor = int(environ["OVERLAP_STATUS_FD"])
        while unsent:
            unsent = unsent[os.write(descriptor, unsent) :]
        return True
    return False


def parse_record(data: bytes) -> Record | None:
    """Return the record in a line that a process has written, or None if the line is no record."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _RECORDS.decode(data)
    return None
