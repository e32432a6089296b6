"""Statements about traces of devices that only some of the ranks have recorded: true, or not made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import overlap
from overlap.explain.oddities import oddities
from overlap.timeline.files.reading import read_trace
from overlap.timeline.measure.metrics import breakdowns
from overlap.timeline.measure.operations import operations
from overlap.timeline.spans import Timeline

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


def launched(number: int, at: float, ts: float, dur: float, name: str = "gemm", tid: int = 7) -> list[Event]:
    """A kernel that the host has launched at an instant."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=number),
        event("kernel", name, ts, dur, tid, correlation=number),
    ]


def read(folder: Path, *events: Event, world: int = 1, device: bool = True) -> Timeline:
    path = folder / "trace.json"
    document = {
        "schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": world}, "traceEvents": events,
        "deviceProperties": [{"id": 0, "name": "any"}] if device else [],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return read_trace(path)


def steps(timeline: Timeline) -> dict[int | None, tuple[int, int]]:
    return {span.step: (span.start_ns // 1000, span.end_ns // 1000) for span in timeline.spans if span.kind == "step"}


def test_a_step_of_a_device_is_what_the_host_has_launched_in_it(tmp_path: Path) -> None:
    host = [event("user_annotation", f"ProfilerStep#{step}", 100 * step, 100) for step in (1, 2, 3)]
    kernels = [
        *launched(1, 110, 150, 50),
        *launched(2, 190, 230, 70),
        *launched(3, 210, 300, 90),
        *launched(4, 310, 400, 20),
    ]
    timeline = read(tmp_path, *host, *kernels)
    assert steps(timeline) == {1: (150, 300), 2: (300, 400), 3: (400, 420)}
    assert [breakdowns(timeline, step=step)[0].compute_ns for step in (1, 2, 3)] == [120_000, 90_000, 20_000]


def test_the_profilers_own_marks_on_the_device_count_first(tmp_path: Path) -> None:
    host = [event("user_annotation", f"ProfilerStep#{step}", 100 * step, 100) for step in (1, 2)]
    marks = [
        event("gpu_user_annotation", "ProfilerStep#1", 160, 100, 7),
        event("gpu_user_annotation", "ProfilerStep#2", 270, 30, 7),
    ]
    timeline = read(tmp_path, *host, *marks, *launched(1, 110, 150, 100), *launched(2, 210, 280, 20))
    assert steps(timeline) == {1: (160, 270), 2: (270, 300)}


def test_without_recorded_launches_no_step_is_known(tmp_path: Path) -> None:
    """The host is ahead of its device: its window of a step holds kernels of the step before."""
    host = event("user_annotation", "ProfilerStep#1", 100, 100)
    assert steps(read(tmp_path, host, event("kernel", "gemm", 150, 10, 7, correlation=3))) == {}


def test_a_device_without_kernels_is_told_beside_the_operators_of_its_host(tmp_path: Path) -> None:
    timeline = read(tmp_path, event("cpu_op", "aten::mm", 10, 20))
    assert breakdowns(timeline)[0].compute_ns == 20_000
    assert oddities(timeline).startswith("no kernel of its device is recorded")
    assert oddities(read(tmp_path, event("cpu_op", "aten::mm", 10, 20), device=False)) == ""


def test_engines_of_mtia_compute_and_do_other_things(tmp_path: Path) -> None:
    other = event("mtia_ccp_events", "event_wait", 0, 500, 3)
    timeline = read(tmp_path, event("cpu_op", "aten::mm", 10, 20), event("mtia_ccp_events", "pe_exe", 20, 30, 3), other)
    assert breakdowns(timeline)[0].compute_ns == 30_000


def test_symmetric_memory_communicates(tmp_path: Path) -> None:
    names = (
        "void multimem_all_reduce_kernel<float>",
        "multimem_all_reduce_kernel",
        "void two_shot_all_reduce_kernel<float>",
    )
    kernels = [each for at, name in enumerate(names) for each in launched(at, 10 * at, 100 * at + 50, 10, name)]
    (row,) = breakdowns(read(tmp_path, *kernels, *launched(9, 40, 60, 5)))
    assert (row.comm_ns, row.compute_ns) == (30_000, 5_000)


def test_one_rank_of_several_cannot_tell_waiting_from_the_wire(tmp_path: Path) -> None:
    kernels = [*launched(1, 10, 50, 10), *launched(2, 20, 60, 30, "ncclDevKernel_AllReduce", 9)]
    timeline = read(tmp_path, *kernels, world=2)
    found = overlap.why(timeline)
    wait_or_wire = "wait or wire cannot be told: other ranks are not in the trace"
    assert f"30.0 communicating (ncclDevKernel_AllReduce); {wait_or_wire}" in found.verdict
    assert found.cost_ns("communication") == 30_000
    alone = overlap.why(read(tmp_path, *kernels, world=1))
    assert "30.0 on the wire (ncclDevKernel_AllReduce)" in alone.verdict
    assert alone.cost_ns("communication") == 0


def test_copies_are_neither_idle_nor_compute(tmp_path: Path) -> None:
    kernels = [*launched(1, 0, 10, 10), *launched(2, 1, 90, 10)]
    copy = event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 15, 70, 7, correlation=3)  # 20 to 85 on its own
    timeline = read(tmp_path, *kernels, copy)
    (row,) = breakdowns(timeline)
    assert (row.wall_ns, row.compute_ns, row.copy_ns, row.idle_ns) == (90_000, 20_000, 65_000, 5_000)
    assert overlap.why(timeline).verdict == (
        "whole recording 90.0 us: compute 20.0; 65.0 (72%) copies and sets of memory with nothing in parallel; 5.0 "
        "(6%) nothing is recorded"
    )


def test_operations_of_other_sizes_are_rows_of_their_own(tmp_path: Path) -> None:
    def sums(count: int) -> dict[str, object]:
        return {"Collective name": "allreduce", "In msg nelems": count, "Out msg nelems": count, "dtype": "Float"}

    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    events = [event("kernel", name, 100 * at, 10 + at, 9, **sums(size)) for at, size in enumerate((1024, 4096, 1024))]
    rows = operations(read(tmp_path, *events, world=1))
    assert [(row.count, row.nbytes, row.transfer_ns) for row in rows] == [(2, 8192, 22_000), (1, 16384, 11_000)]
