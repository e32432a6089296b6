"""One rank on each host, of which the second's event loop stands still again and again.

`python -m tests.benchmarks.two_hosts.standing_still` sends to that rank, has it send everything back, and prints as
JSON how many elements were wrong.
"""

import json
from time import sleep

import numpy as np

import overlap

_MESSAGES, _ELEMENTS = 6, 1 << 20
_STANDS_STILL_S = 0.3


async def echoed(rank: overlap.Rank) -> int:
    """Send to a rank that seldom looks, and have it send everything back."""
    sent = [np.arange(_ELEMENTS, dtype=np.float32) + number for number in range(_MESSAGES)]
    like = (sent[0].shape, np.float32)
    if rank.rank == 0:
        pending = [rank.send(x, 1) for x in sent]
        got = [await rank.recv(like, 1) for _ in sent]
        for each in pending:
            await each
        return sum(int(np.count_nonzero(x != y)) for x, y in zip(sent, got, strict=True))
    for _ in sent:
        sleep(_STANDS_STILL_S)  # noqa: ASYNC251 (that is the point)
        await rank.send(await rank.recv(like, 0), 0)
    return 0


def main() -> None:
    """Run it, and print what the rank here found."""
    [told] = overlap.run(echoed)
    print(json.dumps({"told": told}), flush=True)  # only the first host is heard


if __name__ == "__main__":
    main()
