"""The overlap of PyTorch's traces is that of HolisticTraceAnalysis, where that is installed; else by hand."""

import random

import pytest

from overlap.timeline import breakdowns, read_trace
from tests.explain.profiles import Recording

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def written(folder, rank, events):
    """Write work of a device, in whole microseconds: HolisticTraceAnalysis rounds others."""
    rec = Recording(rank=rank, world=2)
    rec.note("ProfilerStep#1", 0, 5_000)
    rec.call("cudaLaunchKernel", 1, 3)
    for category, name, start, length, stream in events:
        rec.add(
            category, name, start, start + length, pid=0, tid=stream, stream=stream, device=0, correlation=1,
            **{"External id": 1},
        )  # fmt: skip
    return rec.write(folder / f"rank{rank}.json")


def test_kernels_of_all_streams_count_and_copies_and_synchronisation_do_not(tmp_path):
    events = [
        ("kernel", "gemm", 100, 100, 7),
        ("kernel", "gemm", 150, 100, 8),  # 100 to 250 together
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 250, 100, 7),
        ("cuda_sync", "Stream Sync", 250, 100, 1_000_007),
        ("gpu_user_annotation", "ProfilerStep#1", 100, 400, 7),
        ("kernel", ALL_REDUCE, 200, 100, 20),
        ("kernel", ALL_REDUCE, 250, 150, 21),  # 200 to 400 together
    ]
    (row,) = breakdowns(read_trace(written(tmp_path, 0, events)))
    assert (row.compute_ns, row.comm_ns, row.overlapped_ns, row.overlap_ratio) == (150_000, 200_000, 50_000, 0.25)


def kernels(seed):
    rng = random.Random(seed)
    kinds = [("kernel", "gemm"), ("kernel", "elementwise"), ("kernel", ALL_REDUCE), ("gpu_memcpy", "Memcpy HtoD"),
             ("gpu_memset", "Memset (Device)"), ("cuda_sync", "Event Sync")]  # fmt: skip
    return [
        (*rng.choice(kinds), rng.randrange(10, 4_000), rng.randrange(1, 200), rng.choice([7, 8, 20]))
        for _ in range(rng.randrange(20, 60))
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of another project
def test_it_is_what_holistic_trace_analysis_says(tmp_path):
    analysis = pytest.importorskip("hta.trace_analysis", reason="not installed: HolisticTraceAnalysis")
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        files = [written(folder, rank, kernels(10 * seed + rank)) for rank in (0, 1)]
        ours = {row.rank: row.overlap_ratio for file in files for row in breakdowns(read_trace(file))}
        theirs = analysis.TraceAnalysis(trace_dir=str(folder)).get_comm_comp_overlap(visualize=False)
        told = dict(zip(theirs["rank"], theirs["comp_comm_overlap_pctg"], strict=True))
        assert told == {rank: pytest.approx(100 * ratio, abs=0.00501) for rank, ratio in ours.items()}
