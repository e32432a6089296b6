"""Cases that several processes measure in turn."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from overlap.cli.bench.cases import Assignment, Case


@dataclass(frozen=True, kw_only=True)
class AssignmentInTurn(Assignment):
    """Cases that processes measure when it is their turn."""

    turns: str = ""  # The socket at which they wait for each row; empty: they do not wait
    name: str = ""  # Whose turns these are

    def in_turn(self) -> Iterator[Case]:
        """Yield each row when it is to be measured, until the other end is closed."""
        if not self.turns:
            yield from self.cases
            return
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.turns)
            connection.sendall(self.name.encode())
            for case in self.cases:
                if not connection.recv(1):
                    return
                yield case
                connection.sendall(b"d")

    def to_json(self) -> str:
        """Return the assignment as one argument of a command."""
        return json.dumps(json.loads(super().to_json()) | {"turns": self.turns, "name": self.name})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` has written."""
        told, plain = json.loads(text), Assignment.from_json(text)
        return cls(
            cases=plain.cases, sampling=plain.sampling, check=plain.check, turns=told["turns"], name=told["name"]
        )
