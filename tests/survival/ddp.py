"""Program for tests of `--survive`: DistributedDataParallel with gradients that are whole numbers, so sums are exact.

Arguments: STEP:MEMBER,... for each kill; or "raises", of a rank's own error.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import overlap.torch

STEPS = 30
MEMBER = int(os.environ["OVERLAP_NODE_RANK"])


def gradient(step: int, rank: int) -> float:
    return float(4 * (step * 7 % 11) + 12 * rank)  # divisible by the numbers of ranks that there are


def main(kills: set[tuple[int, int]]) -> None:
    module, step, source = torch.nn.Linear(3, 1, bias=False), 0, 0
    torch.nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    history = []
    while step < STEPS:
        dist.init_process_group("overlap", init_method="overlap://")
        state = [(module.state_dict(), step)]
        dist.broadcast_object_list(state, src=source)
        module.load_state_dict(state[0][0])
        step, rank = state[0][1], dist.get_rank()
        history.append((step, dist.get_world_size()))
        model = torch.nn.parallel.DistributedDataParallel(module)
        try:
            while step < STEPS:
                if (step, MEMBER) in kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                if kills == {(-1, -1)} and step == 3 and rank == 1:
                    raise RuntimeError("own code")
                optimizer.zero_grad()
                (model(torch.ones(1, 3)) * gradient(step, rank)).sum().backward()
                optimizer.step()
                step += 1
        except RuntimeError as error:
            source = overlap.torch.next_world(error, step=step).source
    print(f"member {MEMBER} history {history} weight {module.weight.tolist()[0]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    raises = sys.argv[1] == "raises"
    main({(-1, -1)} if raises else {tuple(map(int, kill.split(":"))) for kill in sys.argv[1].split(",")})
