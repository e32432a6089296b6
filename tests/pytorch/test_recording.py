"""What torch computes stands in the timeline, beside what travels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import overlap  # noqa: E402
from overlap.timeline import Timeline  # noqa: E402
from overlap.torch import record  # noqa: E402


def computed(rank: overlap.Rank) -> list[tuple[str, int | None]]:
    return [(span.name, span.step) for span in rank.recorder.spans() if span.kind == "compute"]


def test_forward_backward_and_updates_are_spans_of_their_steps() -> None:
    with overlap.connect(0, 1) as world:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        end = record(model, optimizer, rank=world.rank)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        for _ in range(2):
            step()
        end()
        step()
        parts = ["forward 0", "forward 1", "forward 2", "backward 2", "backward 1", "backward 0", "SGD"]
        assert computed(world.rank) == [(part, step) for step in range(2) for part in parts]


def test_the_last_step_ends_with_the_world() -> None:
    with overlap.connect(0, 1) as world:
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        record(layer, optimizer, rank=world.rank)
        for _ in range(2):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    timeline = Timeline.collect([world.rank.recorder], world_size=1)
    steps = [span for span in timeline.spans if span.kind == "step"]
    assert [span.step for span in steps] == timeline.steps() == [0, 1]
    assert steps[0].end_ns <= steps[1].start_ns
    assert steps[1].end_ns >= max(span.end_ns for span in timeline.spans if span.kind == "compute")


def test_an_evaluation_is_no_step() -> None:
    with overlap.connect(0, 1) as world:
        layer = nn.Linear(2, 1)
        end = record(layer, rank=world.rank)
        with torch.no_grad():
            layer(torch.ones(1, 2))
        end()
        assert computed(world.rank) == [("forward Linear", None)]


def test_without_a_world_nothing_can_be_recorded() -> None:
    with pytest.raises(overlap.UsageError) as caught:
        record(nn.Linear(1, 1))
    expected = "rank: there is no world; call init_process_group('overlap'), or pass overlap.connect(...).rank"
    assert str(caught.value) == expected
