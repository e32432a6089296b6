"""Open and close mailboxes, each with the thread of its own that a first message starts; print how many there are."""

import os
import sys

import numpy as np

import tests.transports.mailbox_builds  # noqa: F401 - takes the extension that is to be used
from tests.transports.test_mailbox import Boxes


def threads() -> int:
    """Return the number of threads of this process, those of compiled code included."""
    return len(os.listdir("/proc/self/task"))


before, most = threads(), 0
for _ in range(int(sys.argv[1])):
    boxes = Boxes(2)
    boxes.send(0, 1, np.zeros(4, np.uint8))
    most = max(most, threads() - before)
    boxes.boxes[0].close()
print(f"{most} more with a mailbox, {threads() - before} more at the end")
