"""Write garbage into the memory that two mailboxes share, while messages flow between them.

The mailboxes may fail with an error, or wait until they are closed; they touch no memory but their own, and they close.
`python -m tests.transports.mailbox_builds` runs this under a sanitizer.
"""

import argparse
import random
import threading
from time import monotonic

import numpy as np

from tests.threads import running

from .test_mailbox import CORRUPT, DONE, MISMATCH, PENDING, RING_BYTES, Boxes

_COUNTS_BYTES, _GUARD = 256, 64
_LENGTHS = [0, 4, 300, RING_BYTES // 2, 3 * RING_BYTES]


def _garbage(order: random.Random, boxes: Boxes) -> None:
    """Write one word: a count, a head, a bell, or the bytes of a message."""
    memory = order.choice([*boxes.rings.values(), *boxes.bells])
    ahead = int.from_bytes(memory[0:8], "little")
    value = order.choice([order.getrandbits(64), order.getrandbits(14), ahead + order.randrange(-200, 200)]) % 2**64
    value &= order.choice([-1, -64, 7])  # also whole lines, and the numbers of kinds
    at = order.choice([order.randrange(0, _COUNTS_BYTES, 8), order.randrange(0, len(memory) - 8, 8)])
    nbytes = order.choice([1, 4, 8])
    memory[at : at + nbytes] = value.to_bytes(8, "little")[:nbytes]


def _round(seed: int) -> list[int]:
    """Send and receive amid garbage; return the states in which the receives are left."""
    order, boxes = random.Random(seed), Boxes(2)
    over = threading.Event()

    def write() -> None:
        own = random.Random(seed + 1)
        while not over.wait(own.choice([0.0, 1e-4, 1e-3])):
            _garbage(own, boxes)

    with running(threading.Thread(target=write)):
        outs, states = [], []
        for _ in range(order.randrange(40)):
            src, tag, nbytes = order.randrange(2), order.randrange(2), order.choice(_LENGTHS)
            out = np.full(nbytes + 2 * _GUARD, 255, np.uint8)
            outs.append(out)
            boxes.send(src, 1 - src, np.zeros(nbytes, np.uint8), tag)
            got = boxes.receive(1 - src, order.choice([src, -1]), out[_GUARD : _GUARD + nbytes], tag)
            if order.randrange(4) == 0:
                boxes.boxes[1 - src].withdraw(got)
            states.append(boxes.wait(1 - src, got, order.choice([0.0, 0.01])))
        over.set()
    for box in boxes.boxes:
        box.close()
    assert all((out[:_GUARD] == 255).all() and (out[len(out) - _GUARD :] == 255).all() for out in outs), seed
    return states


def main() -> None:
    """Fuzz for some seconds, and print how many receives ended in which state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    until, rounds, states = monotonic() + options.seconds, 0, list[int]()
    print(f"seed {options.seed}", flush=True)
    while monotonic() < until:
        states += _round(options.seed + rounds)
        rounds += 1
    names = {PENDING: "pending", DONE: "done", MISMATCH: "mismatch", CORRUPT: "corrupt"}
    counts = ", ".join(f"{states.count(state)} {name}" for state, name in names.items())
    print(f"{rounds} rounds: {counts}")
    assert states.count(DONE)
    assert states.count(CORRUPT)


if __name__ == "__main__":
    main()
