"""Reading trace files: ours, those of earlier versions, and those of other tools."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

from ...errors import UsageError
from ..spans import Timeline
from .earlier import earlier_timeline
from .kineto import profile_timeline
from .neuron import from_neuron
from .packed import is_array, is_profile, may_be_earlier, open_unpacked, read_beginning, read_piece
from .profile import read_profile
from .sections import MAX_TEXT_BYTES, PIECE_BYTES, Sections, load_json


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace file: ours, one of PyTorch's profiler (a rank; `merged` joins them), or a system profile of Neuron.

    Of a file that was cut off, all complete events are taken; `meta` says so. Cost: 3 microseconds a span.

    Raises:
        UsageError: If the file is missing, damaged, unpacks to more than a trace does, or shows neither compute nor
            communication.
    """
    try:
        regular = os.path.isfile(path)
        begin = read_beginning(Path(path)) if regular else b""
        if is_profile(begin):
            return profile_timeline(read_profile(path))
        with open(path, "rb") as opened:
            raw = opened if regular else io.BytesIO(opened.read())  # a pipe is read only once
            begin = begin or raw.read(PIECE_BYTES)
            raw.seek(0)
            if is_array(begin):
                return Sections(open_unpacked(raw)).timeline()
            return _parse_document(*_read_text(raw))
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


def _read_text(raw: BinaryIO) -> tuple[bytes, bool]:
    """Return the text of a file, unpacked, and whether it is complete; raise UsageError for a packed one too large."""
    file = open_unpacked(raw)
    if file is raw:
        return file.read(), True
    text, cut = read_piece(file, MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise UsageError(
            f"unpacks to more than {MAX_TEXT_BYTES >> 20} MiB, and is no trace of ours: "
            "if it is a trace, unpack it with gunzip first"
        )
    return text, not cut


def _parse_document(data: bytes, complete: bool) -> Timeline:
    """Return the timeline of a JSON object: a trace of an earlier version, or a profile of Neuron."""
    if may_be_earlier(data[:PIECE_BYTES]):
        return earlier_timeline(data, complete=complete)
    content = load_json(data)
    if isinstance(content, dict) and isinstance(hardware := content.get("trace_events"), list):
        return from_neuron(hardware)
    raise UsageError(
        "not a trace of overlap or of PyTorch's profiler, and no system profile of Neuron; name one of these"
    )
