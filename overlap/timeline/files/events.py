"""Reader of a list of events in a JSON text, whole or cut off, piece by piece, into typed structs.

A piece of the text is cut after a "}" that seems to end an event, closed with "]", and decoded. It is a valid list
exactly if the cut is between two events; otherwise another cut is tried. If none is found, Python's `json` parses the
events one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Generic, TypeVar, cast

import msgspec

from ...errors import UsageError
from .packed import read_piece

PIECE_BYTES = 1 << 20
MAX_PIECE_BYTES = 256 << 20
"""If no event ends within this many bytes, the text is no trace."""
_MAX_CUTS_TRIED = 32  # cuts tried in a piece before it is decoded event by event
_TRAILER_BYTES = 16 << 20

OF_OBJECT, OF_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\['), re.compile(rb"\[")
"""Patterns that match up to the "[" of a list of events: a field of an object, and a list that is the whole text."""
_BETWEEN = re.compile(r"[\s,]*")
_EVENT_END = re.compile(rb"\}\s*,\s*(?=\{)")
_LEAD = re.compile(rb"[ \r\n\t,]*")

Event = TypeVar("Event")


class EventReader(Generic[Event]):
    """Reader of the events of a text. Iterate over it once; it yields lists of events, and holds one piece of the text.

    Attributes:
        fields: Other fields of the object that contains the list: at first those before the list; fields after it are
            added when the whole list has been read.
        is_complete: Whether the list is closed, that is, not cut off; known after the iteration.

    Args:
        file: The text, at its beginning.
        kind: Type of an event.
        begin: Pattern that matches up to the "[" of the list, `OF_OBJECT` or `OF_ARRAY`.
    """

    is_strict: ClassVar[bool] = True  # whether an event with a field of a wrong type raises an error

    def __init__(self, file: BinaryIO, kind: object, begin: re.Pattern[bytes]) -> None:
        self._file, self._kind, self._begin, self._data = file, kind, begin, b""
        self._decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
        self._cut = False  # whether the last piece was cut off: a packed file ends too early, or is damaged, behind it
        self._count = 0  # events before the text in `_data`
        self.fields: dict[str, Any] = {}
        self.is_complete: bool = False

    def __iter__(self) -> Iterator[list[Event]]:
        match = None
        while match is None and self._read_more_text():
            match = self._begin.search(self._data)
        if match is None:
            raise UsageError("not a trace file: no list 'traceEvents' in it; name a file of export_chrome_trace")
        # The fields before the list: the object, closed where the list begins.
        self.fields = _parse_object(self._data[: match.start()].rstrip().removesuffix(b",") + b"}")
        self._data, closed = self._data[match.end() :], False
        while not closed:
            if separators := cast("re.Match[bytes]", _LEAD.match(self._data)).end():
                self._data = self._data[separators:]
            if not self._data and not self._read_more_text():
                break
            if events := self._decode_piece():
                yield events
                if len(self._data) < PIECE_BYTES:
                    self._read_more_text()
                continue
            before = len(self._data)
            events, closed = self._decode_one_by_one()
            yield events
            if not closed and not self._read_more_text() and len(self._data) == before:
                break
        self.is_complete = closed and not self._cut
        if closed:
            while len(self._data) < _TRAILER_BYTES and self._read_more_text():
                pass
            self.fields |= _parse_object(b"{" + self._data.lstrip(b" \r\n\t,"))

    def convert_items(self, items: list[object]) -> list[Event]:
        """Return the next events of the list from parsed JSON; items that are no objects are left out.

        Raises:
            msgspec.ValidationError: A field is not what it should be; the message names it and the number of its event.
        """
        events: list[Event] = []
        for number, item in enumerate(items, self._count):
            try:
                events += msgspec.convert([item] if isinstance(item, dict) else [], list[self._kind])  # type: ignore[name-defined]
            except msgspec.ValidationError as error:
                raise msgspec.ValidationError(_describe_wrong_field(str(error), number)) from error
        self._count += len(items)
        return events

    def _read_more_text(self) -> bool:
        """Append a piece of the file to the text, and return False at the end of the file."""
        # The text at least doubles, so that searching it again costs no more than reading it.
        piece, self._cut = read_piece(self._file, max(PIECE_BYTES, len(self._data)))
        self._data += piece
        if len(self._data) > MAX_PIECE_BYTES:
            raise UsageError(
                f"no event ends within {MAX_PIECE_BYTES >> 20} MiB: not a trace file, or damaged; record it again"
            )
        return bool(piece)

    def _decode_piece(self) -> list[Event]:
        """Take the events up to the last one before another from the text; [] if no cut between events is found."""
        data, end = self._data, len(self._data)
        for _ in range(_MAX_CUTS_TRIED):
            end = data.rfind(b"}", 0, end)
            if end <= 0:
                break
            match = _EVENT_END.match(data, end)
            if match is None or not data.startswith((b"{", b'"'), match.end()):
                continue
            # If events of this file begin with "ph", an object without it is inside an event.
            if b'"ph"' not in data[match.end() : match.end() + 40] and b'"ph"' in data[:4096]:
                continue
            try:
                events: list[Event] = self._decode(b"".join((b"[", memoryview(data)[: end + 1], b"]")))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if self.is_strict and isinstance(error, msgspec.ValidationError):
                    break  # parsing the events one by one shows the number of the wrong one
                continue
            self._data = data[match.end() :]
            self._count += len(events)
            return events
        return []

    def _decode_one_by_one(self) -> tuple[list[Event], bool]:
        """Take the complete events from the text, parsed one by one; return also whether the list ends after them."""
        text, begin, decoder = self._data.decode("utf-8", "surrogateescape"), 0, json.JSONDecoder()
        items: list[object] = []
        closed = False
        while not closed:
            begin = cast("re.Match[str]", _BETWEEN.match(text, begin)).end()
            if closed := text[begin : begin + 1] == "]":
                begin += 1
                break
            try:
                item, begin = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):
                break
            items.append(item)
        self._data = text[begin:].encode("utf-8", "surrogateescape")
        return self.convert_items(items), closed


def _describe_wrong_field(text: str, number: int) -> str:
    """Return the text of a msgspec error on a list of one event in plain words.

    "Expected `int`, got `str` - at `$[0].args.seq`" gives "event 17, field args.seq: Expected `int`, got `str`".
    """
    reason, _, place = text.partition(" - at `$[0]")
    field = place.removeprefix(".").removesuffix("`")
    return f"event {number}{f', field {field}' if field else ''}: {reason}"


def _parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object, or {} if the bytes are something else."""
    try:
        found = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
