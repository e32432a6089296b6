"""Text of files that may be packed: its beginning, by which kinds of files are known, and its pieces."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path
from typing import BinaryIO

from ...errors import UsageError
from ...units import format_bytes, parse_bytes

LIMIT_VARIABLE = "OVERLAP_UNPACKED"
"""Variable with the limit of unpacked bytes, for processes that read files, too."""
UNPACKED = "8GiB"
"""Most bytes that all packed files of one call unpack to, by default: a bomb of 44 MB unpacks to 45 GB."""


class Unpacking:
    """Count of the bytes that files have unpacked to.

    Attributes:
        nbytes: Bytes since the count was last set.
    """

    def __init__(self) -> None:
        self.nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count unpacked bytes.

        Raises:
            UsageError: They are more than the limit.
        """
        self.nbytes += nbytes
        limit_bytes = parse_bytes(os.environ.get(LIMIT_VARIABLE) or UNPACKED, argument=LIMIT_VARIABLE)
        if self.nbytes > limit_bytes:
            raise UsageError(
                f"the files unpack to more than {format_bytes(limit_bytes)}: name fewer of them, or set "
                f"{LIMIT_VARIABLE}=SIZE (overlap why --unpacked SIZE) if no file is a bomb"
            )


unpacking: Unpacking = Unpacking()
"""The count of this process."""


def read_beginning(path: Path) -> bytes:
    """Return the first bytes of a file's unpacked text; b"" if the file cannot be read.

    Raises:
        UsageError: It is an archive of several files.
    """
    try:
        with open(path, "rb") as raw:
            begin = read_piece(open_unpacked(raw), _BEGIN_BYTES)[0]
    except OSError:
        return b""
    if begin[257:262] == b"ustar":
        raise UsageError(f"{path} is a tar archive: unpack it (tar xf {path}), and name the folder or its files")
    return begin


def may_be_earlier(begin: bytes) -> bool:
    """Whether the first bytes of a text may be those of a trace file of an earlier version of ours."""
    return _OWN.search(begin) is not None


def is_array(begin: bytes) -> bool:
    """Whether the first bytes of a text are those of a JSON array of objects, as our trace files are."""
    return _ARRAY.match(begin) is not None


def is_profile(begin: bytes) -> bool:
    """Whether the first bytes of a text are those of a file of PyTorch's profiler, and not of our trace files."""
    return b'"traceEvents"' in begin and not may_be_earlier(begin) and any(mark in begin for mark in _MARKS)


def open_unpacked(raw: BinaryIO) -> BinaryIO:
    """Return a file that reads the text: through gzip if the file begins as gzip does, or else the file itself."""
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
    """Return up to `most_bytes` next bytes of a file, and whether a gzip file is cut off or damaged after them."""
    pieces: list[bytes] = []
    while most_bytes > 0:
        try:
            piece = file.read1(most_bytes) if isinstance(file, gzip.GzipFile) else file.read(most_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b"".join(pieces), True
        if not piece:
            break
        if isinstance(file, gzip.GzipFile):
            unpacking.add(len(piece))
        pieces.append(piece)
        most_bytes -= len(piece)
    return b"".join(pieces), False
