"""One trace file of all processes, of any size; and what becomes of it when one of them is gone."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import overlap
from overlap import trace_files
from overlap.config import RunConfig
from overlap.processes import traces as traces
from overlap.processes.clock import ClockOffset
from overlap.processes.join import Membership
from overlap.processes.trace_writer import TraceWriter
from overlap.processes.traces import TraceFile, join_leftover_files, part_path
from overlap.timeline import Recorder, read_trace
from overlap.timeline.files.trace import Header, join_parts
from overlap.timeline.recording import RawSpan
from tests.interpreters import Python, environment, launch, run

from .company import meet

NEEDS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")


@pytest.fixture(autouse=True)
def no_thread_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests write by themselves."""
    monkeypatch.setattr(traces, "EVERY_S", 1e6)


def recorded(
    folder: Path | str, member: int, *, members: int, spans: int = 1, clock: ClockOffset | None = None,
    name: str = "t.json",
) -> TraceFile:  # fmt: skip
    """Return the file of a member with one rank, which takes part in collectives of all; its section has ended."""
    recorder = Recorder(member, capacity=spans)
    group = ("world", tuple(range(members)))
    for seq in range(spans):
        meeting = ("all_reduce", "ring", group, seq, 8, "float32", 10 * seq + 1)
        raw: RawSpan = ("comm", "comm", "all_reduce", 10 * seq, 10 * seq + 9, (meeting, 10 * seq, 0, "t.py:1", 0, None))
        recorder.append(raw)
    file = TraceFile(part_path(Path(folder, name), member))
    header = Header(world_size=members, clock="real", run="job.0", process=member)
    file.begin_section(header, [recorder], clock=None if clock is None else lambda: clock)
    file.end_section({})
    return file


async def joined(membership: Membership, path: str | Path, own: TraceFile) -> None:
    """End a run well, as one of its processes."""
    with TraceWriter(RunConfig.from_values(trace=str(path))) as writer:
        writer._file = own
        await membership.leave()
        await writer.join_all_files(membership)


@pytest.mark.parametrize("launched", [False, True])
def test_a_run_that_fails_leaves_a_file_of_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    """A launcher of ours makes one of what is left, so that they print nothing under it."""
    path, own = tmp_path / "t.json", tmp_path / "t-process0.json"
    monkeypatch.setenv("OVERLAP_HOSTS", "1" if launched else "2")
    with TraceWriter(RunConfig.from_values(trace=str(path))) as writer:
        writer._file = recorded(tmp_path, 0, members=2)
    assert list(tmp_path.iterdir()) == [own]
    assert read_trace(own).world_size == 2
    left = (
        f"overlap: no {path}: not all processes ended well; `overlap timeline {tmp_path}/t-process*.json -o t.json` "
        "makes one of what each has left\n"
    )
    assert capsys.readouterr().err == ("" if launched else left)
    assert join_leftover_files(path, "another") == []
    assert join_leftover_files(path, "job") == [path]
    assert list(tmp_path.iterdir()) == [path]
    assert read_trace(path).ranks() == [0]


def test_the_trace_of_all_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    trace_files.forget_paths()

    async def main(membership: Membership) -> None:
        own = recorded(tmp_path, membership.member, members=3, spans=5_000, clock=membership.clock_offset)
        await joined(membership, path, own)

    assert meet(3, main) == []
    assert trace_files._written_files == {path}
    assert [file.name for file in tmp_path.iterdir()] == ["t.json.gz"]
    whole = read_trace(path)
    assert [len(whole.for_rank(rank)) for rank in whole.ranks()] == [5_000] * 3
    assert all(span.duration_ns == 9 for span in whole.spans)
    first = [span for span in whole.spans if span.info and span.info.seq == 0]
    last_ns = max(span.start_ns for span in first)
    assert [span.info.met_ns for span in first if span.info] == [min(last_ns, span.end_ns) for span in first]


def test_a_program_that_changes_its_directory_has_its_trace_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(rank: overlap.Rank) -> None:
        monkeypatch.chdir(tmp_path / "elsewhere")
        await rank.barrier()

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    overlap.run(main, ranks=2, trace="t.json")
    assert read_trace(tmp_path / "t.json").ranks() == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "t.json"]


@pytest.mark.parametrize("missing", ["another run", "no file"])
def test_processes_without_a_common_disk_keep_a_file_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    path = tmp_path / "t.json"

    async def main(membership: Membership) -> None:
        file = recorded(tmp_path, membership.member, members=2)
        if membership.member == 1 and missing == "another run":
            file.path.write_text(file.path.read_text().replace("job.0", "job.1"))
        elif membership.member == 1:
            file.path.rename(tmp_path / "elsewhere.json")
        await joined(membership, path, file)

    meet(2, main)
    assert not path.exists()
    assert capsys.readouterr().err == (
        f"overlap: no {path}: not all processes write to one disk; `overlap timeline {tmp_path}/t-process*.json -o "
        "t.json` makes one of what each has left\n"
    )


@NEEDS_FULL
def test_where_it_cannot_be_written_every_process_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces.tempfile, "tempdir", str(tmp_path))

    async def main(membership: Membership) -> None:
        file = recorded("/dev", membership.member, members=2, name="full")
        if membership.member:
            await joined(membership, "/dev/full", file)
            return
        refused = "^trace: cannot write /dev/full: No space left on device; name another file$"
        with pytest.warns(overlap.TraceWarning, match=refused):
            await joined(membership, "/dev/full", file)

    meet(2, main)
    kept = [tmp_path / f"full-process{member}" for member in range(2)]
    assert [read_trace(path).ranks() for path in kept] == [[0], [1]]


def test_of_several_attempts_the_last_is_joined(tmp_path: Path) -> None:
    for member in range(3):
        file = recorded(tmp_path, member, members=3)
        if member < 2:
            file.path.write_text(file.path.read_text().replace("job.0", "job.1"))
    assert join_leftover_files(tmp_path / "t.json", "job") == [tmp_path / "t.json"]
    assert read_trace(tmp_path / "t.json").ranks() == [0, 1]
    recorded(tmp_path, 1, members=2)
    (tmp_path / "t-process1.json").write_text((tmp_path / "t-process1.json").read_text().replace("job.0", "job.1"))
    (tmp_path / "t-process2.json").unlink()
    assert join_leftover_files(tmp_path / "t.json", "job") == []  # of a process that the others went on without


def test_a_file_that_was_cut_anywhere_is_joined(tmp_path: Path) -> None:
    whole, found = recorded(tmp_path, 1, members=2, spans=9).path.read_bytes(), []
    for kept in [*range(0, len(whole), 5), len(whole) - 2]:
        (tmp_path / "t-process1.json").write_bytes(whole[:kept])
        other = recorded(tmp_path, 0, members=2)
        join_parts([other.path, tmp_path / "t-process1.json"], tmp_path / "t.json")
        assert isinstance(json.loads((tmp_path / "t.json").read_text()), list)
        timeline = read_trace(tmp_path / "t.json")
        if kept > whole.index(b"\n", 2):
            assert ("cut" in timeline.meta) == (kept < len(whole) - 3)
        found.append(len(timeline.for_rank(1)))
    assert found == sorted(found)
    assert set(found) == set(range(10))


def test_clocks_that_drift_apart_for_an_hour_stay_within_the_error(tmp_path: Path, monkeypatch: Any) -> None:
    """By 50 millionths: 180 ms in an hour."""
    now_ns, error_ns, spans = 0, 200_000, 600
    recorder = Recorder(0, capacity=spans)
    monkeypatch.setattr(traces, "perf_counter_ns", lambda: now_ns)

    def offset_ns(at_ns: int) -> int:
        return 10**15 + at_ns * 50 // 1_000_000

    file = TraceFile(tmp_path / "t.json")
    clock = lambda: ClockOffset(offset_ns=offset_ns(now_ns), error_ns=error_ns)  # noqa: E731
    file.begin_section(Header(world_size=1, clock="real", run="job.0"), [recorder], clock=clock)
    instants_ns = range(0, 3_600 * 10**9, 6 * 10**9)
    for now_ns in instants_ns:
        recorder.append(("compute", "compute", "f", now_ns, now_ns, None))
        file.flush()
    file.end_section({})
    found = read_trace(file.path)
    pairs = zip(instants_ns, found.spans, strict=True)
    off_ns = [span.start_ns - at_ns - offset_ns(at_ns) for at_ns, span in pairs]
    assert max(map(abs, off_ns)) <= error_ns
    assert found.meta["clock_error_ns"] == str(error_ns)


def test_a_part_is_kept_where_there_is_room(tmp_path: Path) -> None:
    assert part_path(tmp_path / "run.json", 3) == tmp_path / "run-process3.json"
    assert part_path("/nowhere/run.json", 3) == Path(traces.tempfile.gettempdir(), "run-process3.json")


ENDLESS = """
import overlap, numpy as np

async def main(rank):
    for step in range(10**9):
        with rank.step(step):
            await rank.all_reduce(rank.compute(np.zeros, 4))
        if step == 20:
            print("runs", flush=True)

overlap.run(main, ranks=2)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_file_that_is_read(tmp_path: Path) -> None:
    """At 20 moments, of which some are within a write."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    options = ["-m", "overlap", "run", "--trace", "run.json", "--trace-steps", "last:500", "endless.py"]
    spans = []
    for moment in range(20):
        with Python(*options, cwd=tmp_path, env=environment()) as job:
            assert job.stdout is not None
            assert "runs" in job.stdout.readline()
            while (tmp_path / "run-process0.json").stat().st_size < 2_000:  # until the first spans are in it
                time.sleep(0.05)
            time.sleep(0.1 * moment)
            job.kill()
        text = (tmp_path / "run-process0.json").read_bytes()
        assert text.startswith(b"[\n")
        *lines, last = text[2:].split(b",\n")
        assert all("ph" in json.loads(line) for line in lines)  # the form that viewers read without an end
        with suppress(ValueError):
            json.loads(last)
        timeline = read_trace(tmp_path / "run-process0.json")
        assert timeline.meta["cut"] in ("what was recorded before the run was killed", "only what is complete")
        spans.append(len(timeline.spans))
        for command in ("timeline", "why") if moment % 7 == 0 else ():
            done = run("-m", "overlap", command, "run-process0.json", cwd=tmp_path, env=environment(), timeout=60)
            assert done.returncode == 0, done.stderr
        assert join_leftover_files(tmp_path / "run.json", "no job") == []
    assert min(spans) > 20


@pytest.mark.slow
def test_the_trace_of_a_run_has_the_spans_of_a_killed_process(tmp_path: Path) -> None:
    script = ENDLESS.replace(
        'print("runs", flush=True)', "import os, time, signal; time.sleep(1.5 * rank.rank)"
    ).replace("ranks=2", "")
    script = script.replace("1.5 * rank.rank)", "1.5 * rank.rank); rank.rank and os.kill(os.getpid(), signal.SIGKILL)")
    done = launch(tmp_path, script, "--processes", "2", "--trace", "run.json")
    assert done.returncode != 0
    assert (
        "overlap: trace in run.json, of killed processes up to their last second; `overlap timeline run.json`"
        in done.stderr
    )
    assert "that of this process is in" not in done.stderr
    assert [path.name for path in tmp_path.glob("*.json")] == ["run.json"]
    assert read_trace(tmp_path / "run.json").ranks() == [0, 1]
    assert read_trace(tmp_path / "run.json").meta["cut"] == "what was recorded before the run was killed"
