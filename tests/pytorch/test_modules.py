"""Modules of torch on several ranks: they learn what one rank learns from the whole batch, whatever is shared out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import overlap  # noqa: E402
from overlap.torch import DataParallel, Sharded  # noqa: E402
from tests.core.test_shared_results import lies  # noqa: E402

from .pairs import connected, do  # noqa: E402

KINDS: dict[str, Callable[..., Any]] = {
    "data parallel": DataParallel,
    **{f"stage {stage}": partial(Sharded, stage=stage) for stage in (1, 2, 3)},
}
STEPS = 4
_RANDOM = threading.Lock()  # all ranks of these tests share torch's generator


class Store:
    """What connections of one process meet in."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, 60)
            return self.values[key]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(overlap.UsageError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[overlap.Connection]]:
    with connected(2, Store()) as two:
        for world in two:
            world.rank.compute(lambda: None).result()  # the thread of its computes lives as long as it
        yield two


@pytest.fixture(autouse=True)
def _opened_before_the_census(worlds: Any) -> None:
    pass


class Net(nn.Module):
    """Layers of several kinds: one that uses another's weights, one with weights of its own beside its parts'."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with _RANDOM, torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.down, self.gain = nn.Linear(8, 1), nn.Parameter(torch.ones(1))
            self.double()

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.norm(self.up(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.gain * self.down(x)


def batch(step: int) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(step)
    shape = {"dtype": torch.float64, "generator": made}
    return torch.randn(4, 3, 6, **shape), torch.randn(4, 3, 1, **shape)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, 0.01)


def alone(clip_norm: float | None = None) -> list[Any]:
    """What one rank learns from the whole batch, with a schedule that changes the learning rate in each step."""
    net = Net()
    optimizer = adam(net.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in net.parameters()]


def trained(rank: overlap.Rank, kind: Callable[..., Any], **settings: Any) -> list[Any]:
    net = Net(seed=rank.rank)  # the first rank's weights count
    model = kind(net, adam, rank=rank, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.5)
    for step in range(STEPS):
        x, y = batch(step)
        half = slice(2 * rank.rank, 2 * rank.rank + 2)
        nn.functional.mse_loss(model(x[half]), y[half]).backward()
        model.step()
        schedule.step()
    return [p.detach().clone() for p in model.finish().parameters()]


def both(worlds: list[overlap.Connection], function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    found = do([partial(function, world.rank, *args, **settings) for world in worlds])
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [None, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_learn_what_one_learns_from_the_whole_batch(
    worlds: list[overlap.Connection], kind: str, bucket_bytes: int | None
) -> None:
    first, second = both(worlds, trained, KINDS[kind], bucket_bytes=bucket_bytes)
    for expected, one, other in zip(alone(), first, second, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


def test_gradients_that_travel_together_lie_where_the_other_processes_read_them() -> None:
    found: list[bool] = []

    class Looking(torch.optim.SGD):  # type: ignore[misc]
        def step(self, *_: Any) -> None:
            gradients = [p.grad.numpy() for group in self.param_groups for p in group["params"] if p.grad is not None]
            found.extend(lies(gradient)[0] > 0 for gradient in gradients)

    def train(rank: overlap.Rank) -> None:
        net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        model = DataParallel(net, partial(Looking, lr=0.1), rank=rank, bucket_bytes=4 << 20)
        model(torch.ones(1, 512)).sum().backward()
        model.step()
        model.finish()

    with connected(2, Store()) as two:
        both(two, train)
    assert found == [True] * 4 * 2


def test_gradients_are_clipped_as_one_rank_clips_them(worlds: list[overlap.Connection]) -> None:
    first, _ = both(worlds, trained, DataParallel, bucket_bytes=200, clip_norm=0.1)
    for expected, one in zip(alone(clip_norm=0.1), first, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_nobody(worlds: list[overlap.Connection], kind: str) -> None:
    stepped = threading.Event()

    def program(rank: overlap.Rank) -> None:
        model = KINDS[kind](nn.Linear(2, 2), adam, rank=rank)
        loss = model(torch.ones(1, 2)).sum()
        if rank.rank == 1:
            assert stepped.wait(30)
        loss.backward()
        model.step()
        stepped.set()
        model.finish()

    both(worlds, program)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_backwards_leave_together(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> float:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        model = KINDS[kind](layer, lambda parameters: torch.optim.SGD(parameters, 1.0), rank=rank)
        with model.no_sync():
            model(torch.full((1, 1), 1.0 + rank.rank)).sum().backward()
        model(torch.full((1, 1), 10.0)).sum().backward()
        model.step()
        return model.finish().weight.item()

    assert both(worlds, program) == [1 - 11.5, 1 - 11.5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_gradient_in_a_step_is_refused(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> str:
        model = KINDS[kind](nn.Linear(1, 1, bias=False), adam, rank=rank)
        model(torch.ones(1, 1)).sum().backward()
        return refused(model(torch.ones(1, 1)).sum().backward)

    expected = (
        "weight: its gradient has left already in this step; run all backwards of a step but the last in `with "
        "model.no_sync():`, or add their losses up"
    )
    assert both(worlds, program) == [expected] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_thawed_too_late_is_refused(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> str:
        layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        layers[0].requires_grad_(False)
        model = KINDS[kind](layers, adam, rank=rank)
        layers[0].requires_grad_(True)
        model(torch.ones(1, 1)).sum().backward()
        return refused(model.step)

    expected = (
        "step: 0.weight requires a gradient, and did not when the model was made; let it require one before, and stop "
        "that afterwards"
    )
    assert both(worlds, program) == [expected] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_loaded_are_those_that_are_trained(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> list[float]:
        layer = nn.Linear(1, 1, bias=False)
        model = KINDS[kind](layer, lambda parameters: torch.optim.SGD(parameters, 1.0), rank=rank)
        found = []
        for _ in range(2):
            model.load_state_dict({"weight": torch.full((1, 1), 5.0)})
            model(torch.full((1, 1), 2.0)).sum().backward()
            model.step()
            with torch.no_grad():
                found.append(model.finish().weight.mul_(10).item())  # and what is written
            model(torch.full((1, 1), 2.0)).sum().backward()
            model.step()
            found.append(model.finish().weight.item())
        return found

    assert both(worlds, program) == [[30.0, 28.0, 30.0, 28.0]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_the_optimizer_is_that_of_the_last_step(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank) -> list[float]:
        model = KINDS[kind](nn.Linear(1, 1), adam, rank=rank)
        found = []
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
            model.step()
            if rank.rank == 0:  # alone
                found += [each["step"].item() for each in model.optimizer.state_dict()["state"].values()]
        model.finish()
        return sorted(set(found))

    assert both(worlds, program) == [[1.0, 2.0], []]


def test_a_parameter_of_stage_3_is_nan_between_its_uses(worlds: list[overlap.Connection]) -> None:
    def program(rank: overlap.Rank) -> list[bool]:
        layer = nn.Linear(2, 2)
        model = Sharded(layer, adam, rank=rank)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            model.step()
        between = bool(layer.weight.isnan().all())
        return [between, bool(model.finish().weight.isnan().any())]

    assert both(worlds, program) == [[True, False]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_differ_name_the_programs_line(kind: str) -> None:
    def program(rank: overlap.Rank) -> str:
        with pytest.raises(overlap.CollectiveMismatchError) as caught:
            KINDS[kind](nn.Linear(1, 1 + rank.rank), adam, rank=rank)
        return str(caught.value)

    with connected(2, Store()) as two:
        assert [text.count("test_modules.py:") for text in both(two, program)] == [2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient(worlds: list[overlap.Connection], kind: str) -> None:
    def program(rank: overlap.Rank, unused: Any) -> list[float]:
        net = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
        net.forward = net["used"].forward  # type: ignore[method-assign]
        model = KINDS[kind](net, adam, rank=rank, unused=unused)
        model(torch.ones(1, 1)).sum().backward()
        if unused == "error":
            return [refused(model.step)]
        model.step()
        before = net["unused"].weight.item() if kind != "stage 3" else 0.0
        model.finish()
        return [net["unused"].weight.item() - before if kind != "stage 3" else 0.0]

    assert both(worlds, program, "zeros") == [[0.0]] * 2
    expected = "step: unused.bias, unused.weight had no gradient; pass unused='zeros' if that is meant"
    assert both(worlds, program, "error") == [[expected]] * 2


def test_a_weight_that_is_used_behind_the_models_back(worlds: list[overlap.Connection]) -> None:
    def program(rank: overlap.Rank) -> str:
        layer = nn.Linear(1, 1, bias=False)
        model = DataParallel(layer, adam, rank=rank)
        model(torch.ones(1, 1)).sum().backward()
        model.step()
        told = refused((layer.weight * 2).sum().backward)
        model.finish()
        return told

    expected = (
        "weight: it was used before its update, by a module that neither owns it nor is called above its owner; call "
        "model.finish() before such a forward"
    )
    assert both(worlds, program) == [expected] * 2


def test_a_stage_3_keeps_a_part_of_the_parameters_between_their_uses(worlds: list[overlap.Connection]) -> None:
    def program(rank: overlap.Rank) -> list[int]:
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model = Sharded(layers, adam, rank=rank, bucket_bytes=64 * 64 * 4, depth=0)

        def held() -> int:
            return sum(bucket.whole.untyped_storage().nbytes() for bucket in model._buckets)

        found = []
        for _ in range(2):
            loss = model(torch.ones(1, 64)).sum()
            found.append(held())
            loss.backward()
            found.append(held())
            model.step()
        model.finish()
        return found

    whole = 2 * (64 * 64 + 64) * 4
    assert both(worlds, program) == [[whole, whole, 0, 0]] * 2


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no world": (
        lambda _: DataParallel(nn.Linear(1, 1), adam),
        "rank: there is no world; call init_process_group('overlap'), or pass overlap.connect(...).rank",
    ),
    "nothing to train": (
        lambda rank: DataParallel(nn.ReLU(), adam, rank=rank),
        "module: it has no parameter that requires a gradient; call it without a wrapper",
    ),
    "a norm that is none": (
        lambda rank: DataParallel(nn.Linear(1, 1), adam, rank=rank, clip_norm=0),
        "clip_norm: expected a positive number, got 0",
    ),
    "a stage that is none": (
        lambda rank: Sharded(nn.Linear(1, 1), adam, rank=rank, stage=4),  # type: ignore[arg-type]
        "stage: expected 1, 2 or 3, got 4",
    ),
    "another word for unused": (
        lambda rank: DataParallel(nn.Linear(1, 1), adam, rank=rank, unused="ones"),  # type: ignore[arg-type]
        "unused: expected 'error' or 'zeros', got 'ones'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_at_the_call(worlds: list[overlap.Connection], what: str) -> None:
    call, text = REFUSED[what]
    assert refused(lambda: call(worlds[0].rank)) == text
