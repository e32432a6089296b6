"""What happens in a version of torch without each of the private names that we use."""

import sys
from collections.abc import Callable, Iterator
from importlib import reload
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd.profiler import record_function  # noqa: E402

import overlap  # noqa: E402
from overlap.runtime.memory.foreign import make_change_check  # noqa: E402
from overlap.torch import private, record  # noqa: E402
from overlap.torch.errors import CallError  # noqa: E402
from overlap.torch.issuing import parse_reduction  # noqa: E402
from overlap.torch.operations import exclude_from_compiler  # noqa: E402

from .test_profiler import computed, recorded  # noqa: E402

Monkeypatch = pytest.MonkeyPatch


@pytest.fixture
def without(monkeypatch: Monkeypatch) -> Iterator[Callable[[Any, str], None]]:
    """Take a name away, also where it was bound when the module was imported."""

    def hide(owner: Any, name: str) -> None:
        monkeypatch.delattr(owner, name)
        reload(private)

    yield hide
    monkeypatch.undo()
    reload(private)


# -- torch's compiler --------------------------------------------------------------------------------------------------


def test_without_its_callback_methods_are_called_as_they_are(
    without: Callable[[Any, str], None], monkeypatch: Monkeypatch
) -> None:
    disabled: list[Any] = []
    monkeypatch.setattr(torch.compiler, "disable", lambda method: disabled.append(method) or method)
    frames = torch._C._dynamo.eval_frame
    monkeypatch.setattr(frames, "get_eval_frame_callback", lambda: "a compiler")
    reload(private)
    assert exclude_from_compiler(abs_of)(-1) == 1
    assert disabled == [abs_of]
    without(frames, "get_eval_frame_callback")
    assert exclude_from_compiler(abs_of)(-2) == 2
    assert (private.compiler_callback(), disabled) == (None, [abs_of])


def abs_of(x: int) -> int:
    return abs(x)


def test_a_compiler_that_cannot_be_told_is_not_told(monkeypatch: Monkeypatch) -> None:
    told: list[Any] = []
    for frames, answer in ((SimpleNamespace(skip_code=told.append), True), (SimpleNamespace(), False), (None, False)):
        monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace(eval_frame=frames))  # type: ignore[arg-type]
        assert private.skip_code(abs_of.__code__) is answer
    assert told == [abs_of.__code__]


# -- calls that wait ------------------------------------------------------------------------------------------------


def test_without_works_of_torch_a_call_that_has_ended_has_one_of_ours(without: Callable[[Any, str], None]) -> None:
    assert type(private.finished_work) is dist.Work
    without(torch._C._distributed_c10d, "_create_work_from_future")
    assert private.finished_work is None


def test_without_the_method_of_reducers_none_is_replaced(without: Callable[[Any, str], None]) -> None:
    without(torch._C._distributed_c10d.Reducer, "_set_forward_pass_work_handle")
    private.keep_works_of_forwards()
    assert not hasattr(torch._C._distributed_c10d.Reducer, "_set_forward_pass_work_handle")


def test_the_method_of_reducers_gets_the_keywords_of_its_caller(monkeypatch: Monkeypatch) -> None:
    class Reducer:
        def _set_forward_pass_work_handle(self, *args: object, **options: object) -> None:
            got.append((self, args, options))

    got: list[Any] = []
    monkeypatch.setattr(torch._C._distributed_c10d, "Reducer", Reducer)
    private.keep_works_of_forwards()
    reducer = Reducer()
    reducer._set_forward_pass_work_handle("work", 1, useStaticWorldSize=True)
    assert got == [(reducer, ("work", 1), {"useStaticWorldSize": True})]


# -- torch's profiler --------------------------------------------------------------------------------------------------


def reduce(group: Any) -> None:
    group.allreduce([torch.ones(3)]).wait()


def test_without_its_question_the_profiler_shows_none_of_our_operations(
    without: Callable[[Any, str], None], tmp_path: Path
) -> None:
    without(torch.autograd, "_profiler_enabled")
    assert recorded(tmp_path / "trace.json", reduce) == []


def test_without_its_records_the_profiler_shows_them_under_our_names(monkeypatch: Monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch._C._profiler, "_RecordFunctionFast")
    assert [each["name"] for each in recorded(tmp_path / "trace.json", reduce)] == ["overlap:all_reduce"]


def test_without_ends_at_futures_an_operation_seems_to_end_with_its_call(
    monkeypatch: Monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(record_function, "_call_end_callbacks_on_future")
    call, operation = recorded(tmp_path / "trace.json", reduce)
    assert [call["name"], operation["name"]] == ["c10d::allreduce_", "overlap:all_reduce"]
    assert operation["ts"] + operation["dur"] <= call["ts"] + call["dur"]


# -- training ----------------------------------------------------------------------------------------------------------


def test_without_its_end_a_backward_pass_is_recorded_up_to_the_next_one(monkeypatch: Monkeypatch) -> None:
    engine = torch.autograd.Variable._execution_engine
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", SimpleNamespace(run_backward=engine.run_backward))
    with overlap.connect(0, 1) as world:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        end = record(model, rank=world.rank)
        names = []
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            names.append([name for name, _ in computed(world.rank) if name.startswith("backward")])
        end()
    assert names == [["backward 1"], ["backward 1", "backward 0", "backward 1"]]


def test_a_factor_is_found_in_any_version_or_refused(monkeypatch: Monkeypatch) -> None:
    operator = dist._make_nccl_premul_sum(2.0)
    assert parse_reduction(operator) == ("sum", 2.0)
    assert private.get_factor(OldOperator()) == 3.0
    assert private.get_factor(object()) is None
    monkeypatch.setattr(private, "get_factor", lambda op: None)
    with pytest.raises(CallError, match="op: backend 'overlap' reduces by AVG, BAND, "):
        parse_reduction(operator)


class OldOperator:
    def __getstate__(self) -> tuple[str, float]:
        return "PREMUL_SUM", 3.0


def test_without_versions_no_change_of_a_tensor_is_seen() -> None:
    class Unversioned(torch.Tensor):
        @property
        def _version(self) -> int:
            raise AttributeError("_version")

    plain = torch.ones(1)
    changed = make_change_check(plain)
    plain.add_(1)
    assert changed is not None
    assert changed()
    assert make_change_check(torch.ones(1).as_subclass(Unversioned)) is None
