"""Reading trace files: ours, those of earlier versions, and those of other tools."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...errors import UsageError
from ..spans import Timeline
from .earlier import earlier_timeline
from .events import PIECE_BYTES
from .kineto import profile_timeline
from .neuron import from_neuron
from .packed import is_array, is_profile, may_be_earlier, open_unpacked, read_beginning, read_piece
from .profile import read_profile
from .sections import read_sections

MAX_TEXT_BYTES = 256 << 20
"""Longest text of a packed file that must be parsed as a whole, in memory."""


@contextmanager
def named_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name a file in the errors of a block that reads it.

    Raises:
        UsageError: In place of an `OSError`, or of an error that a damaged file causes.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; name a file that can be read") from error
    except UsageError as error:
        raise error if str(error).startswith(f"{path}") else UsageError(f"{path}: {error}") from error
    except OverflowError as error:
        raise UsageError(
            f"{path}: damaged trace file: a number in it has more than 64 bits; record it again"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path}: damaged trace file: {error}; record it again") from error


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace file: ours, one of PyTorch's profiler (a rank; `merged` joins them), or a system profile of Neuron.

    Of a file that was cut off, all complete events are taken; `meta` says so. Cost: 3 microseconds a span.

    Raises:
        UsageError: If the file is missing, damaged, unpacks to more than a trace does, or shows neither compute nor
            communication.
    """
    with named_in_errors(path):
        regular = os.path.isfile(path)
        begin = read_beginning(Path(path)) if regular else b""
        if is_profile(begin):
            return profile_timeline(read_profile(path))
        with open(path, "rb") as opened:
            raw = opened if regular else io.BytesIO(opened.read())  # a pipe is read only once
            begin = begin or read_piece(open_unpacked(raw), PIECE_BYTES)[0]
            raw.seek(0)
            if is_array(begin):
                return read_sections(open_unpacked(raw))
            if may_be_earlier(begin) and b'"traceEvents"' in begin:
                return earlier_timeline(open_unpacked(raw))
            return _system_profile(raw)


def _system_profile(raw: BinaryIO) -> Timeline:
    """Return the timeline of a profile of Neuron; raise UsageError for another file, or a packed one too large."""
    file = open_unpacked(raw)
    data = file.read() if file is raw else read_piece(file, MAX_TEXT_BYTES + 1)[0]
    if file is not raw and len(data) > MAX_TEXT_BYTES:
        raise UsageError(
            f"unpacks to more than {MAX_TEXT_BYTES >> 20} MiB, and is no trace of ours: "
            "if it is a trace, unpack it with gunzip first"
        )
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4]:
        raise UsageError("is text in UTF-16 or UTF-32; write it again in UTF-8 (iconv -t UTF-8)")
    try:
        content = json.loads(data)
    except RecursionError:
        raise UsageError("its values are nested too deeply for a trace; name another file") from None
    except ValueError as error:
        raise UsageError(f"not JSON, or cut off before its first event: {error}; record it again") from error
    if isinstance(content, dict) and isinstance(hardware := content.get("trace_events"), list):
        return from_neuron(hardware)
    raise UsageError(
        "not a trace of overlap or of PyTorch's profiler, and no system profile of Neuron; name one of these"
    )
