"""Run programs of torch.distributed on gloo and on overlap, and say where their results differ.

`python -m tests.pytorch.compare SIZE [PROGRAM ...]` prints a line for each program, and ends with 1 if one differs.
"""

import sys

import torch

import overlap.torch  # noqa: F401 (registers the backend)

from .forked import on_ranks
from .programs import PROGRAMS

# Where more than two ranks add up, the order is the algorithm's.
_CLOSE = {"rtol": 1e-4, "atol": 1e-5}

_SAME_ON_ALL_RANKS = {"ddp", "ddp_compiled", "ddp_float16_hook", "ddp_float16_in_cpp", "fsdp2"}
"""Programs that end with the same weights on all ranks; these run twice on overlap, and have the same bits again."""


def difference(size: int, name: str) -> str:
    """Return how the results of a program on both backends compare, as text that is empty if they are equal."""
    expected, got = (on_ranks(size, backend, PROGRAMS[name]) for backend in ("gloo", "overlap"))
    for rank, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
        assert theirs, "a program that computes nothing shows nothing"
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            if size == 2 and not torch.equal(a, b):
                return f"rank {rank}, tensor {index}: {(a - b).abs().max().item():g} apart"
            if not torch.allclose(a, b, **_CLOSE):
                return f"rank {rank}, tensor {index}: {(a - b).abs().max().item():g} apart"
    if name in _SAME_ON_ALL_RANKS:
        for run, ranks in enumerate((got, on_ranks(size, "overlap", PROGRAMS[name]))):
            for rank, ours in enumerate(ranks):
                if not all(map(torch.equal, ours, got[0])):
                    return f"overlap, run {run}, rank {rank}: other bits than rank 0 in run 0"
    return ""


def main(size: int, names: list[str]) -> int:
    """Compare programs, and print what was found."""
    found = {name: difference(size, name) for name in names or PROGRAMS}
    for name, text in found.items():
        print(f"{name}: {text or 'equal'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
