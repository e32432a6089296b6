"""Flight records of worlds that end badly."""

KILLED = """
import os, signal
import numpy as np
import overlap

async def main(rank):
    for step in range(5):
        with rank.step(step):
            if (rank.rank, step) == (1, 3):
                await rank.recv(np.ones(1), 0)
                os.kill(os.getpid(), signal.SIGKILL)
            reduced = rank.all_reduce(np.ones(2, np.float32))
            if step == 3:
                await rank.send(np.ones(1), 1)
            await reduced

overlap.run(main, ranks=2)
"""
