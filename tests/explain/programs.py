"""Programs with a planted loss, recorded by PyTorch's profiler: `python programs.py FOLDER PROGRAM` writes its file."""

import gc
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

LONG_S = 0.02
"""Sleep that is planted: the model takes a hundredth of it."""


MANY = []
"""Objects that the collector visits, made in the first step, which is not recorded."""


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, item):
        time.sleep(LONG_S)
        return torch.ones(8)


def slow_line():
    time.sleep(LONG_S)


def data(model):
    for batch in DataLoader(Slow(), batch_size=1):
        model(batch)


def python(model):
    model(torch.ones(1, 8))
    slow_line()


def collector(model):
    model(torch.ones(1, 8))
    MANY.extend([number] for number in range(len(MANY), 300_000))
    for _ in range(3):
        gc.collect()


def rows(model):
    whole = torch.ones(600, 8)
    for row in whole:
        model(row)


def nothing(model):
    wide = torch.ones(1200, 1200)
    for _ in range(4):
        wide = torch.mm(wide, wide) * 1e-9


def record(path, program):
    model = torch.nn.Linear(8, 8)
    with profile(
        activities=[ProfilerActivity.CPU], with_stack=True, schedule=schedule(wait=0, warmup=1, active=3),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as recording:  # fmt: skip
        for _ in range(4):
            program(model)
            recording.step()


if __name__ == "__main__":
    programs = {program.__name__: program for program in (data, python, collector, rows, nothing)}
    record(Path(sys.argv[1]) / f"{sys.argv[2]}.json.gz", programs[sys.argv[2]])
