"""What a strategy computes by itself is told under the line of the program that has called it."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trio
from numpy.typing import DTypeLike

import overlap
from overlap.collectives.reduce import Array
from overlap.parallel import SGD, Checkpoints, DataParallel, Local, Pipeline, Sequential, Sharded, hooks, schedules
from overlap.timeline import Recorder, Timeline
from tests.errors import error_of

HERE = r"[\w/]*test_named_lines.py"


class Held:
    """Makes steps as SGD does, and does something before each."""

    def __init__(self, before: Callable[[], object]) -> None:
        self._inner, self._before = SGD(0.5), before

    def fresh(self, size: int, dtype: DTypeLike) -> dict[str, Array]:
        return self._inner.fresh(size, dtype)

    def update(self, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
        self._before()
        self._inner.update(param, grad, state, step)


def line_of(words: str) -> int:
    """The first line of this file that ends with these words, with the mark that says so."""
    return lines_of(words)[0]


def lines_of(words: str) -> list[int]:
    """The lines of this file that end with these words, with the mark that says so."""
    with open(__file__) as lines:
        return [number for number, line in enumerate(lines, 1) if line.endswith(f"# {words}\n")]


def a_model(rank: overlap.Rank, kind: type, before: Callable[[], object]) -> DataParallel:
    weights = {"w": np.ones(64, np.float32), "v": np.ones(64, np.float32)}
    return kind(rank, weights, optimizer=Held(before))  # type: ignore[no-any-return]


def gradient() -> Array:
    return np.ones(64, np.float32)


@pytest.mark.parametrize("kind", [DataParallel, Sharded])
def test_a_stall_report_names_the_line_that_asked_for_the_update(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    monkeypatch.setenv("OVERLAP_GIVE_UP_S", "0.4")
    given_up = threading.Event()  # a compute cannot be interrupted: it ends after the ranks have given up

    async def train(rank: overlap.Rank) -> None:
        model = a_model(rank, kind, (lambda: given_up.wait(60)) if rank.rank == 1 else lambda: None)
        try:
            for _ in range(2):
                for name in ("w", "v"):
                    model.reduce(name, rank.compute(gradient))
                model.step()  # the update
            await model.finish()
        finally:
            given_up.set()

    error = error_of(overlap.StallError, overlap.run, train, ranks=2, timeout_s=60)
    assert re.search(rf"it computes 'update' \({HERE}:{line_of('the update')}\)", str(error))


@pytest.mark.parametrize("clock", ["real", overlap.Virtual()])
def test_a_checkpoint_of_one_rank_is_told_with_the_line_that_saves(
    clock: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    monkeypatch.setenv("OVERLAP_GIVE_UP_S", "0.4")

    async def train(rank: overlap.Rank) -> None:
        model = a_model(rank, DataParallel, lambda: None)
        checkpoints = Checkpoints(rank, tmp_path)
        await checkpoints.restore(model)
        if rank.rank == 0:
            await checkpoints.save(model)  # the checkpoint
            await checkpoints.finish()

    error = error_of(overlap.OverlapError, overlap.run, train, ranks=2, clock=clock, timeout_s=60)
    begun = "checkpoint begins #2" if clock == "real" else "checkpoint #0"
    assert re.search(rf"{begun} on group 'world' \({HERE}:{line_of('the checkpoint')}\)", str(error))
    assert "checkpoints.py" not in str(error)


def test_a_verdict_names_the_line_that_asked_for_the_update() -> None:
    async def train(rank: overlap.Rank) -> Recorder:
        model = a_model(rank, DataParallel, lambda: None)
        for step in range(3):
            with rank.step(step):
                for name in ("w", "v"):
                    model.reduce(name, rank.compute(gradient, seconds=0.0))
                model.step()  # the verdict
                await model.finish()
        return rank.recorder

    slow = overlap.Virtual(conditions=overlap.Conditions(stragglers=(1,), straggler_factor=100))
    recorders = overlap.run(train, ranks=2, clock=slow)
    verdict = overlap.why(Timeline.collect(recorders, world_size=2), step=1).verdict
    assert re.search(rf"rank 1 \(compute 'update' at {HERE}:{line_of('the verdict')}\)", verdict.replace("\n", " "))


@pytest.mark.parametrize("kind", [DataParallel, Sharded])
def test_hooks_and_norms_are_told_under_the_lines_of_the_program(kind: type) -> None:
    async def train(rank: overlap.Rank) -> set[str]:
        weights = {"w": np.ones(64, np.float32)}
        model = kind(rank, weights, optimizer=SGD(0.5), hook=hooks.float16(), clip_norm=1.0)
        model.reduce("w", rank.compute(gradient))
        model.step()
        await model.finish()
        issued = [span for span in rank.recorder.spans() if span.kind in ("compute", "comm")]
        return {span.info.call_site if span.info else span.call_site for span in issued}

    for told in overlap.run(train, ranks=2):
        assert [place for place in told if not re.fullmatch(rf"{HERE}:\d+", place)] == []


def plain(w: Array, x: Array) -> tuple[Array, Array]:
    return x, x


def back(w: Array, kept: Array, dy: Array) -> tuple[Array, Array]:
    return dy, w


def test_a_pipeline_is_told_under_the_line_that_runs_it() -> None:
    """Its messages, and the computes of layers of plain functions."""

    async def train(rank: overlap.Rank) -> set[str]:
        schedule = schedules.make("1f1b", ranks=2, microbatches=2)
        [stage] = schedule.stages_of(rank.rank)
        layer = Sequential(rank, {"only": Local(rank, plain, back)}, parts=2)
        pipe = Pipeline(
            rank, schedule, {stage: layer}, {stage: {"only": gradient()}},
            loss=lambda y, target: (y, 0.0), boundary=((2, 4), np.float32),
        )  # fmt: skip
        x = np.ones((4, 4), np.float32)
        passed = await pipe.run(x if stage == 0 else None, x if stage == 1 else None)  # the run
        await passed.loss()  # the run
        spans = [span for span in rank.recorder.spans() if span.kind in ("compute", "comm") and span.name != "ask"]
        return {span.info.call_site if span.info else span.call_site for span in spans}

    for told in overlap.run(train, ranks=2):
        assert {re.sub(f"^{HERE}:", "", place) for place in told} == set(map(str, lines_of("the run")))


def test_what_a_model_issues_when_it_is_made_is_told_under_that_line() -> None:
    async def train(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            await trio.sleep_forever()
        DataParallel(rank, {"w": gradient()}, optimizer=SGD(0.5))  # the model
        raise ValueError("no data")

    error = error_of(overlap.RankFailedError, overlap.run, train, ranks=2)
    (place,) = {doing.rpartition("(")[2] for doing in error.doing if "(" in doing}
    assert re.fullmatch(rf"{HERE}:{line_of('the model')}\)", place)


def test_computes_may_be_issued_on_behalf_of_another_line() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        first = rank.compute(gradient)  # the first
        assert isinstance(first, overlap.ComputeFuture)
        told = [rank.compute(gradient, call_site=site) for site in ("train.py:41", first.place)]
        for each in told:
            await each
        error = error_of(overlap.UsageError, rank.compute, gradient, call_site="nowhere")
        assert str(error) == "call_site: expected a frame or \"file:line\", got 'nowhere'"
        return [each.call_site for each in told if isinstance(each, overlap.ComputeFuture)]

    (sites,) = overlap.run(main, ranks=1)
    assert sites[0] == "train.py:41"
    assert re.fullmatch(rf"{HERE}:{line_of('the first')}", sites[1])
