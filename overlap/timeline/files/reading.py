"""Reading trace files: of overlap, of its earlier versions, and of other tools."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import BinaryIO

from ...errors import UsageError
from ..spans import Timeline
from . import packed
from .earlier import read_earlier_timeline
from .events import PIECE_BYTES
from .kineto import profile_timeline
from .neuron import neuron_timeline
from .profile import read_profile
from .sections import read_sections

MAX_TEXT_BYTES = 256 << 20
"""Longest text of a packed file that must be parsed as a whole, in memory."""


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace file: of overlap, of PyTorch's profiler, or a system profile of Neuron.

    A file of PyTorch's profiler has one rank; `merged` joins several. Of a file that was cut off, all complete events
    are read, and `meta` has the key "cut". Cost: 3 microseconds a span.

    Raises:
        UsageError: The file is missing or damaged, unpacks to too many bytes, or has no compute and no communication.
    """
    with packed.naming_file_in_errors(path):
        regular = os.path.isfile(path)
        # A pipe cannot be opened twice: its beginning is read below.
        begin = packed.read_beginning(Path(path)) if regular else b""
        if packed.is_profile(begin):
            return profile_timeline(read_profile(path))
        with open(path, "rb") as opened:
            raw = opened if regular else io.BytesIO(opened.read())  # a pipe can be read only once
            begin = begin or packed.read_piece(packed.open_unpacked(raw), PIECE_BYTES)[0]
            raw.seek(0)
            if packed.is_json_array(begin):
                return read_sections(packed.open_unpacked(raw))
            if packed.may_be_earlier_version(begin) and b'"traceEvents"' in begin:
                return read_earlier_timeline(packed.open_unpacked(raw))
            return _system_profile(raw)


def _system_profile(raw: BinaryIO) -> Timeline:
    """Return the timeline of a system profile of Neuron.

    Raises `UsageError` for another file, or one that unpacks to more than `MAX_TEXT_BYTES`.
    """
    file = packed.open_unpacked(raw)
    data = file.read() if file is raw else packed.read_piece(file, MAX_TEXT_BYTES + 1)[0]
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
        return neuron_timeline(hardware)
    raise UsageError(
        "not a trace of overlap or of PyTorch's profiler, and no system profile of Neuron; name one of these"
    )
