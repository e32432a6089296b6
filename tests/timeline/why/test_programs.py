"""Programs on the CPU, recorded by PyTorch's profiler, with a planted cause: it is the largest loss, at its line."""

import gc
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

import overlap

LONG_S = 0.02
"""Sleep that is planted: the model takes a hundredth of it."""


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
    many = [[number] for number in range(300_000)]
    for _ in range(3):
        gc.collect()
    del many


def nothing(model):
    wide = torch.ones(700, 700)
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
    return overlap.why(path)


@pytest.mark.parametrize(
    ("program", "cause", "place"),
    [(data, "data", "__getitem__"), (python, "python", "slow_line"), (collector, "gc", "collector")],
)
def test_a_planted_loss_is_the_largest_and_has_its_line(tmp_path, program, cause, place):
    found = record(tmp_path / "t.json", program)
    loss = next(each for each in found.causes if each.cause != "compute")
    assert loss.cause == cause
    assert f"({place})" in loss.places[0] and "test_programs.py" in loss.places[0]
    assert found.advice[0].cause == cause


def test_a_program_that_computes_gets_no_advice(tmp_path):
    found = record(tmp_path / "t.json.gz", nothing)
    assert found.causes[0].cause == "compute"
    assert not found.advice
