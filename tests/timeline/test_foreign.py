"""Traces of other tools: PyTorch's profiler, Neuron's profiles, open arrays, begins and ends."""

import json
import os
import pickle
import signal
import subprocess
import sys
from multiprocessing import Pipe

import pytest
import trio

import overlap
from overlap.cli import main
from overlap.config import overriding_config
from overlap.errors import OverlapError, UsageError
from overlap.explain.oddities import describe_oddities
from overlap.timeline import TimelineView, breakdowns, merged, read_trace, write_trace
from overlap.timeline.files import children
from overlap.timeline.measure.operations import sum_operations_by_line


def written(tmp_path, document, name="t.json"):
    path = tmp_path / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 900, "tid": tid, "args": args}


def kineto(rank, events, *, base_ns=1_700_000_000_000_000_000, world=2):
    info = {"backend": "gloo", "rank": rank, "world_size": world}
    return {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": base_ns, "traceEvents": events}


def gloo(ts, dur, tid=7):
    dims = {"Input Dims": [[256, 4], []], "Input type": ["float", "Scalar"]}
    return event("user_annotation", "gloo:all_reduce", ts, dur, tid, **dims)


def on_cpu(late):
    return [
        event("user_annotation", "ProfilerStep#4", 0, 100 + late),
        event("gpu_user_annotation", "ProfilerStep#4", 50, 10),
        event("cpu_op", "aten::linear", 10, 20 + late),
        event("cpu_op", "aten::addmm", 12, 10),  # inside it
        event("cpu_op", "c10d::allreduce_", 30 + late, 1),
        gloo(40 + late, 60 - (0 if late else -30)),
    ]


def test_the_files_of_two_ranks_of_pytorch_become_one_timeline(tmp_path):
    files = [written(tmp_path, kineto(rank, on_cpu(30 * rank)), f"{rank}.json") for rank in (0, 1)]
    timeline = merged([read_trace(file) for file in files])
    assert (timeline.world_size, timeline.ranks(), timeline.steps()) == (2, [0, 1], [4])
    assert [(s.rank, s.name) for s in timeline.spans if s.kind == "compute"] == [
        (0, "aten::linear"),
        (1, "aten::linear"),
    ]
    first, second = (span.info for span in timeline.spans if span.kind == "comm")
    assert (first.op, first.nbytes, first.ranks, first.seq) == ("all_reduce", 4096, (0, 1), 0)
    assert (first.last_rank_wait_ns, second.last_rank_wait_ns) == (30_000, 0)
    assert first.start_ns == 1_700_000_000_000_040_000
    assert "waiting for rank 1 (compute 'aten::linear')" in overlap.why(timeline, step=4).verdict


def test_kernels_are_computes_and_those_of_a_library_communication(tmp_path):
    args = {
        "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2,
        "dtype": "BFloat16", "Process Group Name": "3", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 5, 4),
        event("cpu_op", "aten::mm", 4, 8),
        event("kernel", "sgemm", 10, 30, 17),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, 40, 19, **args),
        event("cuda_sync", "Stream Sync", 10, 100, 17),
        event("user_annotation", "nccl:all_reduce", 4, 9),
    ]
    timeline = read_trace(written(tmp_path, kineto(1, events)))
    (row,) = breakdowns(timeline)
    assert (row.rank, row.compute_ns, row.comm_ns, row.overlapped_ns) == (1, 30_000, 40_000, 20_000)
    (row,) = sum_operations_by_line(timeline)
    assert (row.op, row.nbytes, row.ranks) == ("all_reduce", 2048, 2)


def test_the_ranks_of_a_large_group_are_those_of_the_world_or_unknown(tmp_path):
    """The profiler lists 30 ranks, and the last one."""

    def group_ranks(world):
        args = {"Group size": 64, "Process Group Name": "0", "Process Group Ranks": str([*range(30), 63])}
        events = [event("kernel", "ncclDevKernel_AllReduce", 0, 9, 19, **{"Collective name": "allreduce"}, **args)]
        return read_trace(written(tmp_path, kineto(0, events, world=world))).spans[0].info.ranks

    assert group_ranks(64) == tuple(range(64))
    assert group_ranks(128) == ()


def test_without_a_compute_lane_nothing_is_called_hidden(tmp_path):
    timeline = read_trace(written(tmp_path, kineto(0, [gloo(0, 50)], world=1)))
    found = overlap.why(timeline)
    assert "compute not recorded" in found.verdict
    assert "what was hidden, as no compute is recorded" in found.undecided


def test_a_program_of_torch_hears_what_records_its_computes(monkeypatch, tmp_path):
    monkeypatch.setenv("OVERLAP_TRACE", str(tmp_path / "run.json"))

    def told(**meta):
        with overlap.connect(0, 1) as connection:
            connection.describe(**meta)
            connection.rank.all_reduce([1.0]).result()
        return overlap.why(max(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)).undecided[-1]

    assert told().endswith("what was hidden, as no compute is recorded")
    assert told(torch="yes").endswith("recorded; overlap.torch.record(model, optimizer) records that of modules")


@pytest.mark.parametrize("how", ["failed", "was stopped"])
def test_a_drawing_says_that_the_run_has_not_ended_well(tmp_path, how):
    async def main(rank):
        await rank.all_reduce(rank.compute(lambda: [1.0], seconds=1.0))
        if how == "failed":
            raise ValueError
        await trio.sleep(9.0)

    timelines = []
    with overriding_config(watcher=timelines.append), pytest.raises(OverlapError):
        overlap.run(main, ranks=2, clock="virtual", timeout_s=2.0 if how == "was stopped" else None)
    title = "".join(text for text, _ in TimelineView(timelines[0]).lines(width=120)[0])
    assert title == f"whole run: 2 of 2 ranks, virtual time, of a run that {how}; ranks in one row are equal"


def test_a_system_profile_of_neuron(tmp_path):
    def hardware(name, at, length, core):
        return {"name": name, "timestamp": at, "duration": length, "lnc_idx": str(core), "worker_gid": core}

    events = [
        hardware("nc_exec_running", 0, 50, 0),
        hardware("cc_running", 40, 30, 0),
        hardware("cc_running", 45, 25, 1),
    ]
    events += [{"name": "nrt_execute", "timestamp": 0, "duration": 90}]
    timeline = read_trace(written(tmp_path, {"trace_events": events, "mem_usage": [], "cpu_util": []}))
    assert [(row.rank, row.compute_ns, row.comm_ns, row.overlapped_ns) for row in breakdowns(timeline)] == [
        (0, 50, 30, 10),
        (1, 0, 25, 0),
    ]


def profile(*durations):
    events = [
        {"name": "cc_running", "timestamp": at, "duration": length, "worker_gid": 0}
        for at, length in enumerate(durations)
    ]
    return {"trace_events": events}


def test_events_of_neuron_that_end_before_they_start_are_left_out_and_told(tmp_path):
    timeline = read_trace(written(tmp_path, profile(5, -3, -4)))
    assert [span.duration_ns for span in timeline.spans] == [5]
    assert describe_oddities(timeline) == (
        "2 spans end before they start (first: 'cc_running' of rank 0): shown is the rest"
    )


def test_a_number_that_is_too_large_ends_the_command_with_one_line(tmp_path, capsys):
    args = {"Collective name": "allreduce", "In msg nelems": 1 << 62, "dtype": "Double", "Group size": 2}
    path = written(tmp_path, kineto(0, [event("kernel", "ncclDevKernel_AllReduce", 1, 2, **args)]))
    assert main(["timeline", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"overlap: {path}: damaged trace file: ")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"traceEvents": [event("overhead", "x", 1, 2)]},
            "not a trace of overlap or of PyTorch's profiler, and no system profile of Neuron; name one of these",
        ),
        (
            {"trace_events": [{"name": "nrt_execute"}]},
            "no compute or communication of a NeuronCore in it; capture a step of the program",
        ),
        (kineto(0, [event("overhead", "x", 1, 2)]), "no event of PyTorch's profiler in it"),
        (
            kineto(0, [event("user_annotation", "x", 1, 2)]),
            "no work of a device in it, and no operator of a host: nothing to show; record a step of the program",
        ),
        (
            {"trace_events": [{"name": "other"}, {"name": "cc_running", "timestamp": "x"}]},
            "event 1 ('cc_running'): timestamp is 'x', not a number of nanoseconds",
        ),
        (kineto(0, [event("kernel", "k", None, 1)]), "no event of PyTorch's profiler in it"),
        (profile(-3, -4), "all of its spans end before they start"),
        (profile(float("inf")), "event 0 ('cc_running'): duration is inf, not a number of nanoseconds"),
        (profile(1 << 70), "a number in it has more than 64 bits"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path, document, message):
    path = written(tmp_path, document)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert (
        str(caught.value)
        .removeprefix(f"{path}: ")
        .removeprefix("damaged trace file: ")
        .removesuffix("; record it again")
        == message
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # no error is its own cause


def test_files_of_the_same_rank_are_not_merged(tmp_path):
    files = [written(tmp_path, kineto(0, on_cpu(0)), name) for name in ("a.json", "b.json")]
    with pytest.raises(
        UsageError, match=r"^not parts of one run: rank 0 is in traces 1 and 2; name the files of one run$"
    ):
        merged([read_trace(file) for file in files])


def test_what_ends_before_it_starts_is_left_out_and_said(tmp_path):
    events = [
        event("kernel", "gemm", 10, 30, 17),
        event("kernel", "late", 50, -5, 17),
        event("kernel", "x", 60, -1, 17),
    ]
    timeline = read_trace(written(tmp_path, kineto(0, events)))
    assert [span.name for span in timeline.spans] == ["gemm"]
    assert describe_oddities(timeline).startswith("2 events end before they start: left out")


def test_why_refuses_a_pipe_without_opening_it(tmp_path):
    """Nobody writes to it: to open it would block for ever."""
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UsageError, match="is no regular file"):
        overlap.why(tmp_path / "pipe.json")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe.json")
    with pytest.raises(UsageError, match="no trace and no dump"):
        overlap.why(tmp_path / "folder")


def test_the_picture_of_a_profile_ends_with_the_sentence_of_why(tmp_path, capsys):
    path = written(tmp_path, kineto(0, [event("cpu_op", "aten::mm", 0, 5)], world=1))
    assert main(["timeline", str(path)]) == 0
    assert capsys.readouterr().out.replace("\n", " ").endswith(f"{overlap.why(path).verdict} ")


def test_processes_read_profiles_for_a_picture_alike(tmp_path, capsys, monkeypatch):
    files = [str(written(tmp_path, kineto(rank, on_cpu(100 * rank)), f"{rank}.json")) for rank in range(2)]
    assert main(["timeline", *files]) == 0
    alone = capsys.readouterr().out
    started = []

    class Counted(subprocess.Popen):
        def __init__(self, *args, **options):
            started.append(args)
            super().__init__(*args, **options)

    monkeypatch.setattr(children, "SMALL_BYTES", 0)
    monkeypatch.setattr(subprocess, "Popen", Counted)
    assert main(["timeline", *files]) == 0
    assert capsys.readouterr().out == alone
    assert len(started) == 2


READS_LONG = """
import sys, time
from pathlib import Path
from overlap.timeline.files import children

def read(file):
    print("reads", file.name, file=sys.stderr, flush=True)
    time.sleep(300)

if __name__ == "__main__":
    from reads_long import read
    children.SMALL_BYTES = 0
    children.read_files(read, [Path(file) for file in sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "raises"])
def test_processes_that_read_end_with_their_parent(tmp_path, number):
    program = written(tmp_path, READS_LONG, "reads_long.py")
    files = [str(written(tmp_path, {}, f"{index}.json")) for index in range(2)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, program, *files], stderr=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stderr is not None
        assert {parent.stderr.readline() for _ in files} == {"reads 0.json\n", "reads 1.json\n"}
        parent.send_signal(number)
        parent.communicate(timeout=60)  # until the processes have closed stderr, too
        assert parent.returncode == -number


def test_a_process_that_starts_after_the_end_of_its_parent_ends():
    own_end, pipe = Pipe()
    with own_end, pipe:
        command = [sys.executable, "-m", children.__name__, "os:stat", str(pipe.fileno()), "0"]
        options = {"pass_fds": [pipe.fileno()], "timeout": 60, "check": False}
        child = subprocess.run(command, capture_output=True, text=True, **options)
    assert (child.returncode, child.stderr) == (1, "")


def test_a_process_that_ends_while_it_reads_is_reported_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "SMALL_BYTES", 0)
    files = [written(tmp_path, {}, f"{number}.json") for number in range(3)]
    with pytest.raises(UsageError, match=r"the process that read .*[01]\.json ended with 1, perhaps for lack"):
        children.read_files(sys.exit, files)


def test_a_picture_is_of_profiles_or_of_other_traces_and_of_ranks_that_they_have(tmp_path, capsys):
    profile = written(tmp_path, kineto(0, [event("cpu_op", "aten::mm", 0, 5)], world=1))
    assert main(["timeline", str(profile), "--rank", "7"]) == 2
    assert "ranks: 7 have no spans; recorded are 0" in capsys.readouterr().err
    write_trace(read_trace(profile), tmp_path / "other.json")
    assert main(["timeline", str(profile), str(tmp_path / "other.json")]) == 2
    assert "name files of one kind" in capsys.readouterr().err
