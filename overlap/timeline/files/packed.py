"""Text of files that may be gzip-compressed: reading it in pieces, the kind of a file by its beginning, and errors."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...errors import UsageError
from ...units import format_bytes, parse_bytes

LIMIT_VARIABLE = "OVERLAP_UNPACKED"
"""Environment variable with the limit of unpacked bytes; processes that read files inherit it."""
UNPACKED = "8GiB"
"""Default limit of the bytes that all compressed files of one call unpack to: a bomb of 44 MB unpacks to 45 GB."""


class Unpacking:
    """Count of the bytes that files have unpacked to, with a limit.

    Attributes:
        nbytes: Bytes unpacked since the caller last set this to 0.
    """

    def __init__(self) -> None:
        self.nbytes: int = 0

    def count_bytes(self, nbytes: int) -> None:
        """Count unpacked bytes.

        Raises:
            UsageError: The count exceeds the limit.
        """
        self.nbytes += nbytes
        limit_bytes = parse_bytes(os.environ.get(LIMIT_VARIABLE) or UNPACKED, argument=LIMIT_VARIABLE)
        if self.nbytes > limit_bytes:
            raise UsageError(
                f"the files unpack to more than {format_bytes(limit_bytes)}: name fewer of them, or set "
                f"{LIMIT_VARIABLE}=SIZE (overlap why --unpacked SIZE) if no file is a bomb"
            )


unpacking: Unpacking = Unpacking()
"""The count of unpacked bytes of this process."""


@contextmanager
def naming_file_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of a block that reads a file into a `UsageError` that begins with the path.

    Raises:
        UsageError: The block raised `OSError`, `ValueError`, `OverflowError`, `FloatingPointError` or `UsageError`.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}; name a file that can be read") from error
    except UsageError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise UsageError(f"{path}: {error}") from error
    except (OverflowError, FloatingPointError) as error:
        raise UsageError(
            f"{path}: damaged trace file: a number in it has more than 64 bits; record it again"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path}: damaged trace file: {error}; record it again") from error


def read_beginning(path: Path) -> bytes:
    """Return the first bytes of a file's unpacked text, or b"" if the file cannot be read.

    Raises:
        UsageError: The file is a tar archive.
    """
    try:
        with open(path, "rb") as raw:
            begin = read_piece(open_unpacked(raw), _BEGIN_BYTES)[0]
    except OSError:
        return b""
    if begin[257:262] == b"ustar":
        raise UsageError(f"{path} is a tar archive: unpack it (tar xf {path}), and name the folder or its files")
    return begin


def may_be_earlier_version(begin: bytes) -> bool:
    """Whether a text that begins with these bytes may be a trace file of an earlier version of overlap."""
    return _OWN.search(begin) is not None


def is_json_array(begin: bytes) -> bool:
    """Whether a text that begins with these bytes is a JSON array of objects, as trace files of overlap are.

    Only the beginning is looked at: the rest may be damaged.
    """
    return _ARRAY.match(begin) is not None


def is_profile(begin: bytes) -> bool:
    """Whether a text that begins with these bytes is a file of PyTorch's profiler, not a trace file of overlap."""
    return b'"traceEvents"' in begin and not may_be_earlier_version(begin) and any(mark in begin for mark in _MARKS)


def open_unpacked(raw: BinaryIO) -> BinaryIO:
    """Return a file that reads the text of `raw`: through gzip if `raw` is a gzip file, otherwise `raw` itself."""
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[return-value]


_BEGIN_BYTES = 1 << 18
_ARRAY = re.compile(rb"\s*\[\s*\{")
_OWN = re.compile(rb'"overlap"\s*:')  # as a key: as a value it is the backend of a profiled job
_MARKS = (
    b'"schemaVersion"', b'"distributedInfo"', b'"deviceProperties"', b'"baseTimeNanoseconds"', b'"cpu_op"',
    b'"cuda_runtime"', b'"gpu_memcpy"', b'"user_annotation"', b'"python_function"',
)  # fmt: skip


def read_piece(file: BinaryIO, most_bytes: int) -> tuple[bytes, bool]:
    """Read up to `most_bytes` bytes, and count them in `unpacking` if the file is compressed.

    Args:
        file: A file of `open_unpacked`.
        most_bytes: Number of bytes; fewer are returned only at the end of the file, or before damage.

    Returns:
        The bytes, and whether a gzip file is cut off or damaged after them.
    """
    pieces: list[bytes] = []
    while most_bytes > 0:
        try:
            # `read` of a damaged gzip file would lose the bytes that it has unpacked so far.
            piece = file.read1(most_bytes) if isinstance(file, gzip.GzipFile) else file.read(most_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b"".join(pieces), True
        if not piece:
            break
        if isinstance(file, gzip.GzipFile):
            unpacking.count_bytes(len(piece))
        pieces.append(piece)
        most_bytes -= len(piece)
    return b"".join(pieces), False
