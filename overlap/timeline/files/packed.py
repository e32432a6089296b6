"""Text of files that may be packed: its beginning, by which kinds of files are known, and its pieces."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import BinaryIO

from ...errors import UsageError


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


def is_profile(begin: bytes) -> bool:
    """Whether the first bytes of a text are those of a file of PyTorch's profiler, and not of our trace files."""
    return b'"traceEvents"' in begin and not _OWN.search(begin) and any(mark in begin for mark in _MARKS)


def open_unpacked(raw: BinaryIO) -> BinaryIO:
    """Return a file that reads the text: through gzip if the file begins as gzip does, or else the file itself."""
    packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[return-value]


_BEGIN_BYTES = 1 << 18
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
        pieces.append(piece)
        most_bytes -= len(piece)
    return b"".join(pieces), False
