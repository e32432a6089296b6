"""What operations on our backend leave in torch's profiler and in the timeline."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.profiler import profile  # noqa: E402

import overlap  # noqa: E402
from overlap.processes.place import without_launcher_variables  # noqa: E402
from overlap.timeline import Timeline  # noqa: E402
from overlap.timeline.files.reading import read_trace  # noqa: E402
from overlap.timeline.span import Span  # noqa: E402
from overlap.torch import ProcessGroup, record  # noqa: E402
from overlap.torch.work import Work  # noqa: E402

from .pairs import ranks  # noqa: E402

# -- what torch's profiler shows of operations on our backend, and what `overlap timeline` reads there -----------------

PROGRAM = Path(__file__).with_name("profiled.py")


def recorded(path: Path, *calls: Any) -> list[dict[str, Any]]:
    """Return the events of c10d and ours that the profiler records of calls on rank 0, in order."""

    def run(group: ProcessGroup) -> None:
        if group.rank() == 0:
            with profile(record_shapes=True) as profiler:
                for call in calls:
                    call(group)
            profiler.export_chrome_trace(str(path))
        else:
            for call in calls:
                call(group)

    with ranks(2) as two:
        assert two.do(run) == [None, None]
    events = json.loads(path.read_text())["traceEvents"]
    ours = [each for each in events if each["name"].startswith(("c10d::", "overlap:"))]
    return sorted(ours, key=lambda each: each["ts"])


def test_a_call_and_its_operation_are_recorded(tmp_path: Path) -> None:
    call, operation = recorded(
        tmp_path / "trace.json", lambda group: group.allreduce([torch.ones(3, dtype=torch.float64)]).wait()
    )
    assert (call["name"], call["cat"]) == ("c10d::allreduce_", "cpu_op")
    described = {name: call["args"][name] for name in ("Collective name", "Group size", "Process Group Ranks", "dtype")}
    assert described == {
        "Collective name": "all_reduce",
        "Group size": 2,
        "Process Group Ranks": "[0, 1]",
        "dtype": "float64",
    }
    assert call["args"]["In msg nelems"] == 3
    assert call["args"]["Input Dims"] == [[[3]]]
    assert (operation["name"], operation["cat"]) == ("overlap:all_reduce", "user_annotation")
    assert call["ts"] <= operation["ts"] <= call["ts"] + call["dur"]
    assert operation["tid"] == call["tid"]


@pytest.mark.slow
def test_an_operation_lasts_until_its_end_not_until_the_end_of_its_call(tmp_path: Path) -> None:
    def later(group: ProcessGroup) -> None:
        x = torch.ones(1)
        if group.rank():
            group._store.wait(["go"])
            group.allreduce([x]).wait()
            return
        work = group.allreduce([x])
        torch.zeros(1)
        group._store.set("go", "1")
        work.wait()

    path = tmp_path / "trace.json"
    call, operation = recorded(path, later)
    zeros = next(each for each in json.loads(path.read_text())["traceEvents"] if each["name"] == "aten::zeros")
    assert call["ts"] + call["dur"] <= zeros["ts"]
    assert operation["ts"] + operation["dur"] >= zeros["ts"] + zeros["dur"]


def test_a_call_that_fails_ends_its_records(tmp_path: Path) -> None:
    def refused(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match="tag"):
            group.send([torch.ones(1)], 1, -1)

    assert [each["name"] for each in recorded(tmp_path / "trace.json", refused)] == ["c10d::send", "overlap:send"]


def communication(path: Path, rank: int) -> list[Span]:
    spans = [span for span in read_trace(str(path)).spans if span.kind == "comm" and span.rank == rank]
    return sorted(spans, key=lambda span: span.info.seq if span.info else -1)


class _Ended:
    """An operation that has ended, and of which a busy thread has yet to say so."""

    done = True

    def __init__(self, said: threading.Event) -> None:
        self._said = said

    def exception(self, timeout: float | None = None) -> None:
        pass

    result = exception

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        threading.Thread(target=lambda: self._said.wait(30) and callback(self)).start()


def test_no_wait_ends_before_the_record_of_its_operation() -> None:
    """Else torch writes the end of a record into memory that the end of its profiler has freed."""
    said, order = threading.Event(), []
    work = Work(_Ended(said), [])
    work.record_end(lambda: order.append("recorded"))
    waiter = threading.Thread(target=lambda: order.append(f"waited {work.wait()}"))
    waiter.start()
    waiter.join(0.2)
    assert not work.is_completed()
    said.set()
    waiter.join(30)
    assert order == ["recorded", "waited True"]
    assert work.is_completed()


@pytest.mark.torch
def test_a_profile_and_our_trace_of_one_job_show_one_communication(tmp_path: Path) -> None:
    """Each record of the profiler begins before the call of ours, and ends after its end.

    The two have clocks of their own: one difference between them lets all operations of a rank lie in their records.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(PROGRAM), str(tmp_path)]
    environ = {
        **without_launcher_variables(os.environ),
        "PYTHONPATH": str(PROGRAM.parents[2]),
        "OVERLAP_TRACE": str(tmp_path / "ours.json"),
    }
    done = subprocess.run(torchrun, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        theirs = [span for span in communication(tmp_path / f"rank{rank}.json", rank) if span.name != "overlap:barrier"]
        by_number = {(span.info.seq, span.info.op): span for span in communication(tmp_path / "ours.json", rank)}
        collectives = [span for span in theirs if span.name not in ("overlap:send", "overlap:recv")]
        assert len(collectives) == 4 + 2 + 8 * 3 + 2
        ahead_ns = []
        for span in collectives:
            own = by_number[span.info.seq, span.info.op]
            assert (own.info.nbytes, f"overlap:{own.name}") == (span.info.nbytes, span.name)
            ahead_ns.append((span.start_ns - own.info.issued_ns, span.end_ns - own.end_ns))
        assert max(begun for begun, _ in ahead_ns) < min(ended for _, ended in ahead_ns)


# -- what torch computes stands in the timeline, beside what travels ---------------------------------------------------


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
