"""Statements about traces of devices that only some of the ranks have recorded: true, or not made."""

from pathlib import Path

import pytest

import overlap
from overlap.explain.oddities import describe_oddities
from overlap.timeline.files.reading import read_trace
from overlap.timeline.measure.metrics import breakdowns
from overlap.timeline.measure.operations import sum_operations_by_line
from overlap.timeline.spans import Timeline
from tests.explain.profiles import Recording


def read(folder: Path, recording: Recording) -> Timeline:
    return read_trace(recording.write(folder / "trace.json"))


def steps(timeline: Timeline) -> dict[int | None, tuple[int, int]]:
    return {span.step: (span.start_ns // 1000, span.end_ns // 1000) for span in timeline.spans if span.kind == "step"}


def test_a_step_of_a_device_is_what_the_host_has_launched_in_it(tmp_path: Path) -> None:
    rec = Recording()
    for step in (1, 2, 3):
        rec.note(f"ProfilerStep#{step}", 100 * step, 100 * step + 100)
    for launch, start, end in ((110, 150, 200), (190, 230, 300), (210, 300, 390), (310, 400, 420)):
        rec.kernel(start, end, launch=launch)
    timeline = read(tmp_path, rec)
    assert steps(timeline) == {1: (150, 300), 2: (300, 400), 3: (400, 420)}
    assert [breakdowns(timeline, step=step)[0].compute_ns for step in (1, 2, 3)] == [120_000, 90_000, 20_000]


def test_the_profilers_own_marks_on_the_device_count_first(tmp_path: Path) -> None:
    rec = Recording()
    for step, start, end in ((1, 160, 260), (2, 270, 300)):
        rec.note(f"ProfilerStep#{step}", 100 * step, 100 * step + 100)
        rec.add("gpu_user_annotation", f"ProfilerStep#{step}", start, end, tid=7)
    rec.kernel(150, 250, launch=110)
    rec.kernel(280, 300, launch=210)
    assert steps(read(tmp_path, rec)) == {1: (160, 270), 2: (270, 300)}


def test_without_recorded_launches_no_step_is_known(tmp_path: Path) -> None:
    """The host is ahead of its device: its window of a step holds kernels of the step before."""
    rec = Recording()
    rec.note("ProfilerStep#1", 100, 200)
    rec.add("kernel", "gemm", 150, 160, tid=7, correlation=3)
    assert steps(read(tmp_path, rec)) == {}


@pytest.mark.parametrize("device", ["any", ""])
def test_a_device_without_kernels_is_told_beside_the_operators_of_its_host(tmp_path: Path, device: str) -> None:
    rec = Recording(device=device)
    rec.op("aten::mm", 10, 30)
    timeline = read(tmp_path, rec)
    assert breakdowns(timeline)[0].compute_ns == 20_000
    assert describe_oddities(timeline).startswith("no kernel of its device is recorded") == bool(device)


def test_engines_of_mtia_compute_and_do_other_things(tmp_path: Path) -> None:
    rec = Recording()
    rec.op("aten::mm", 10, 30)
    rec.add("mtia_ccp_events", "pe_exe", 20, 50, tid=3)
    rec.add("mtia_ccp_events", "event_wait", 0, 500, tid=3)
    assert breakdowns(read(tmp_path, rec))[0].compute_ns == 30_000


def test_symmetric_memory_communicates(tmp_path: Path) -> None:
    rec = Recording()
    names = (
        "void multimem_all_reduce_kernel<float>",
        "multimem_all_reduce_kernel",
        "void two_shot_all_reduce_kernel<float>",
    )
    for at, name in enumerate(names):
        rec.kernel(100 * at + 50, 100 * at + 60, launch=10 * at, name=name)
    rec.kernel(60, 65, launch=40)
    (row,) = breakdowns(read(tmp_path, rec))
    assert (row.comm_ns, row.compute_ns) == (30_000, 5_000)


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_of_several_cannot_tell_waiting_from_the_wire(tmp_path: Path, world: int) -> None:
    rec = Recording(world=world)
    rec.kernel(50, 60, launch=10)
    rec.kernel(60, 90, launch=20, name="ncclDevKernel_AllReduce", stream=9)
    found = overlap.why(read(tmp_path, rec))
    told = "communicating (ncclDevKernel_AllReduce); wait or wire cannot be told: other ranks are not in the trace"
    assert f"30.0 {'on the wire (ncclDevKernel_AllReduce)' if world == 1 else told}" in found.verdict
    assert found.cost_ns("communication") == (0 if world == 1 else 30_000)


def test_copies_are_neither_idle_nor_compute(tmp_path: Path) -> None:
    rec = Recording()
    rec.kernel(10, 20, launch=0)
    rec.kernel(90, 100, launch=1)
    rec.add("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 15, 85, pid=0, tid=7)  # 20 to 85 on its own
    timeline = read(tmp_path, rec)
    (row,) = breakdowns(timeline)
    assert (row.wall_ns, row.compute_ns, row.copy_ns, row.idle_ns) == (90_000, 20_000, 65_000, 5_000)
    assert overlap.why(timeline).verdict == (
        "whole recording 90.0 us: compute 20.0; 65.0 (72%) copies and sets of memory with nothing in parallel; 5.0 "
        "(6%) nothing is recorded"
    )


def test_operations_of_other_sizes_are_rows_of_their_own(tmp_path: Path) -> None:
    rec = Recording()
    for at, count in enumerate((1024, 4096, 1024)):
        rec.collective(100 * at, 100 * at + 10 + at, count=count, size=1)
    rows = sum_operations_by_line(read(tmp_path, rec))
    assert [(row.count, row.nbytes, row.transfer_ns) for row in rows] == [(2, 8192, 22_000), (1, 16384, 11_000)]
