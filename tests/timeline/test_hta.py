"""The overlap of PyTorch's traces is that of HolisticTraceAnalysis, where that is installed; else by hand."""

import json
import random

import pytest

from overlap.timeline import breakdowns, read_trace

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def on_stream(category, name, ts, dur, stream):
    args = {"stream": stream, "device": 0, "correlation": 1, "External id": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": stream, "args": args}


def on_host(category, name, ts, dur):
    args = {"correlation": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 900, "tid": 1, "args": args}


def written(folder, rank, events):
    """Times are whole microseconds: HolisticTraceAnalysis rounds others."""
    host = [on_host("user_annotation", "ProfilerStep#1", 0, 5_000), on_host("cuda_runtime", "cudaLaunchKernel", 1, 2)]
    info = {"backend": "nccl", "rank": rank, "world_size": 2}
    document = {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "any"}], "distributedInfo": info,
        "baseTimeNanoseconds": 0, "traceEvents": [*host, *events],
    }  # fmt: skip
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(document))
    return path


def test_kernels_of_all_streams_count_and_copies_and_synchronisation_do_not(tmp_path):
    events = [
        on_stream("kernel", "gemm", 100, 100, 7),
        on_stream("kernel", "gemm", 150, 100, 8),  # 100 to 250 together
        on_stream("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 250, 100, 7),
        on_stream("cuda_sync", "Stream Sync", 250, 100, 1_000_007),
        on_stream("gpu_user_annotation", "ProfilerStep#1", 100, 400, 7),
        on_stream("kernel", ALL_REDUCE, 200, 100, 20),
        on_stream("kernel", ALL_REDUCE, 250, 150, 21),  # 200 to 400 together
    ]
    (row,) = breakdowns(read_trace(written(tmp_path, 0, events)))
    assert (row.compute_ns, row.comm_ns, row.overlapped_ns, row.overlap_ratio) == (150_000, 200_000, 50_000, 0.25)


def kernels(seed):
    rng = random.Random(seed)
    kinds = [("kernel", "gemm"), ("kernel", "elementwise"), ("kernel", ALL_REDUCE), ("gpu_memcpy", "Memcpy HtoD"),
             ("gpu_memset", "Memset (Device)"), ("cuda_sync", "Event Sync")]  # fmt: skip
    return [
        on_stream(*rng.choice(kinds), rng.randrange(10, 4_000), rng.randrange(1, 200), rng.choice([7, 8, 20]))
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
