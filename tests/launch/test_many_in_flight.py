"""Jobs whose ranks issue thousands of operations before they await the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreters import launch

PROGRAM = """
import numpy as np
import overlap

CALLS = {
    "reduce": lambda rank, x, i: rank.reduce(x, root=0),
    "all_reduce": lambda rank, x, i: rank.all_reduce(x),
    "barrier": lambda rank, x, i: rank.barrier(),
    "broadcast": lambda rank, x, i: rank.broadcast(x, root=0),
    "gather": lambda rank, x, i: rank.gather(x, root=i % 2),
}

async def main(rank):
    kind, elements = "KIND", ELEMENTS
    names = list(CALLS) if kind == "mixed" else [kind]
    x = np.ones(elements, np.float32)
    futures = [CALLS[names[i % len(names)]](rank, x, i) for i in range(3000)]
    for future in futures:
        await future

if __name__ == "__main__":
    overlap.run(main, timeout_s=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "elements", "transport"),
    [
        ("reduce", 1000, "shared_memory"),
        *(
            pytest.param(kind, elements, transport, marks=pytest.mark.slow)
            for kind in ("reduce", "all_reduce", "barrier", "broadcast", "gather", "mixed")
            for elements in (1, 1000)
            for transport in ("shared_memory", "efa")
            if (kind, elements, transport) != ("reduce", 1000, "shared_memory")
        ),
    ],
)
def test_three_thousand_in_flight(kind: str, elements: int, transport: str, tmp_path: Path) -> None:
    program = PROGRAM.replace("KIND", kind, 1).replace("ELEMENTS", str(elements))
    run = launch(tmp_path, program, "--processes", "2", "--transport", transport)
    assert run.returncode == 0, run.stderr
