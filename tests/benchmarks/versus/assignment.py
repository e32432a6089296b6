"""Cases that processes measure, at once or in turn, and their JSON form for those processes."""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from overlap.cli.bench.cases import NAMES, Case, find_dtype
from overlap.cli.bench.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentInTurn:
    """Cases that processes measure in one world when it is their turn."""

    cases: Sequence[Case]  # One for each row; they differ only in their counts
    sampling: Sampling  # Number of samples
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
        rows = [asdict(case) | {"operation": case.operation.name, "dtype": case.dtype.name} for case in self.cases]
        return json.dumps({"cases": rows, "sampling": asdict(self.sampling), "turns": self.turns, "name": self.name})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` has written."""
        document = json.loads(text)
        cases = [
            Case(**row | {"operation": NAMES[row["operation"]], "dtype": find_dtype(row["dtype"])})
            for row in document["cases"]
        ]
        return cls(
            cases=cases, sampling=Sampling(**document["sampling"]), turns=document["turns"], name=document["name"]
        )
