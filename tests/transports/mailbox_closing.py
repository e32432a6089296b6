"""Open and close mailboxes, each with the thread of its own that a first message starts."""

import sys

import numpy as np

import tests.transports.mailbox_builds  # noqa: F401 - takes the extension that is to be used
from tests.transports.test_mailbox import Boxes

for _ in range(int(sys.argv[1])):
    boxes = Boxes(2)
    boxes.send(0, 1, np.zeros(4, np.uint8))
    boxes.boxes[0].close()
