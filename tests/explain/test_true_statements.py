"""Statements that were false on public traces, and are true."""

import pytest

import overlap
from overlap.timeline import read_trace
from tests.explain.profiles import Recording
from tests.explain.test_causes import FILE, LINE, busy, costs, recorded
from tests.explain.test_hosts import host


def test_what_comes_before_the_first_work_of_the_device_is_in_the_step(tmp_path):
    """A step of 382 ms was reported as one of 160, as its device was idle for the first 218."""
    rec = Recording()
    rec.note("ProfilerStep#4", 0, 382_000)
    rec.frame("data.py(7): tokenise", 1_000, 217_900)
    rec.op("aten::mm", 218_000, 218_050)
    rec.kernel(218_040, 382_000, launch=218_030)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found) == {"compute": 163_960, "python": 218_000, "launch": 40}
    assert "Python between operators (data.py:7 (def tokenise))" in found.verdict
    (step,) = [span for span in read_trace(tmp_path / "t.json").spans if span.kind == "step"]
    assert step.duration_ns == 382_000_000


def test_without_steps_the_time_before_the_first_work_counts_too(tmp_path):
    rec = Recording()
    rec.op("aten::item", 0, 100)
    rec.op("aten::mm", 900, 1_000)
    rec.kernel(990, 2_000)
    assert costs(overlap.why(rec.write(tmp_path / "t.json"))) == {"compute": 1_010, "python": 800, "launch": 190}


def test_the_last_step_is_as_long_as_its_annotation(tmp_path):
    """Work that the end of the recording waited for made it longer; steps then seemed to differ."""
    rec = Recording()
    for number in range(3):
        start = 1_000 + 10_000 * number
        rec.note(f"ProfilerStep#{number}", start, start + 10_000)
        for at in range(start, start + 10_000, 100):
            rec.op("aten::add", at, at + 98)
            rec.kernel(at + 90, at + 100, launch=at + 85)
    rec.kernel(37_000, 37_010, launch=30_900)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert found.steps_ns == {"0": 10_000_000, "1": 10_000_000, "2": 10_000_000}
    assert found.advice[0].gain_most_ns is not None


def test_a_device_of_meta_has_all_of_its_events(tmp_path):
    """Of its command processor: what computes and copies is work, and what only orders it is none."""
    rec = Recording(device="MTIA")
    for name, start, end in (
        ("event_wait", 0, 900), ("pe_exe", 100, 300), ("fbgemm::merge_pooled", 300, 400), ("dma_request", 500, 560),
        ("merge", 0, 900),
    ):  # fmt: skip
        rec.add("mtia_ccp_events", name, start, end, pid=17, tid=3774)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found) == {"compute": 300, "copy": 60, "unrecorded": 540}


def test_the_capture_of_a_graph_is_no_wait_for_the_device(tmp_path):
    def plant(rec, start):
        busy(rec, start, start + 3_000)
        rec.frame("torch/cuda/graphs.py(265): __enter__", start + 100, start + 8_000)
        rec.call("cudaDeviceSynchronize", start + 200, start + 3_000)
        rec.frame("<built-in function gc.collect>", start + 3_100, start + 7_000)
        rec.op("aten::mm", start + 8_000, start + 9_000)
        rec.kernel(start + 8_990, start + 10_000)

    assert costs(recorded(tmp_path, plant)) == {"compute": 4_010, "capture": 5_000, "launch": 990}


def test_the_replay_of_a_graph_is_no_capture(tmp_path):
    def plant(rec, start):
        busy(rec, start, start + 3_000)
        rec.frame("torch/cuda/graphs.py(88): replay", start + 100, start + 8_000)
        rec.op("aten::mm", start + 100, start + 9_000)
        rec.kernel(start + 8_990, start + 10_000)

    assert "capture" not in costs(recorded(tmp_path, plant))


WAITS = {
    "lock": ["<method 'acquire' of '_thread.lock' objects>", "threading.py(589): wait", "queue.py(154): get"],
    "files": [
        "<method 'read' of '_io.BufferedReader' objects>", "<built-in function open>",
        "torch/serialization.py(900): save", "<built-in function posix.fsync>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("cause", "name"), [(cause, name) for cause, names in WAITS.items() for name in names])
def test_waits_for_locks_and_files_are_called_so(tmp_path, cause, name):
    def on_device(rec, start):
        rec.frame(FILE, start, start + 10_000)
        busy(rec, start, start + 2_000)
        rec.frame(name, start + 1_000, start + 8_900)
        rec.op("aten::mm", start + 8_900, start + 9_000)
        busy(rec, start + 9_000, start + 10_000)

    found = recorded(tmp_path, on_device)
    assert costs(found) == {"compute": 3_000, cause: 6_900, "launch": 100}
    assert LINE in found.causes[0].places[0]
    assert [item.cause for item in found.advice] == [cause]


@pytest.mark.parametrize("cause", WAITS)
def test_a_lock_that_an_operator_waits_for_is_no_compute(tmp_path, cause):
    """Without a device; another thread that waits all the time says nothing of the program."""

    def plant(rec, start):
        rec.frame(FILE, start, start + 10_000)
        rec.op("custom::op", start, start + 9_000)
        rec.frame(WAITS[cause][0], start + 1_000, start + 7_000)
        rec.op("aten::mm", start + 9_000, start + 10_000)
        rec.frame(WAITS["lock"][0], start, start + 10_000, tid=903)

    assert costs(host(tmp_path, plant)) == {"compute": 4_000, cause: 6_000}


def test_one_cause_has_one_advice(tmp_path):
    def plant(rec, start):
        rec.note("Optimizer.step#Adam.step", start, start + 10_000)
        for at in range(start, start + 10_000, 16):
            rec.op("aten::add_", at, at + 15)
            rec.kernel(at + 12, at + 13, launch=at + 8)

    found = recorded(tmp_path, plant)
    changes = [item.cause for item in found.advice]
    assert len(changes) == len(set(changes)) >= 1


@pytest.mark.parametrize("count", [1 << 12, 1 << 16])
def test_many_small_all_reduces_are_joined(tmp_path, count):
    """404 of 8 us: to split them further was advised."""

    def plant(rec, start):
        busy(rec, start, start + 4_000)
        for number in range(404):
            at = start + 4_000 + 12 * number
            rec.collective(at, at + 8, count=count, launch=at - 3)
        rec.op("autograd::engine::evaluate_function: AddmmBackward0", start + 4_000, start + 9_000)

    found = recorded(tmp_path, plant, world=2)
    advice = next(item for item in found.advice if item.cause in ("communication", "wire"))
    assert advice.change.startswith("join them")
    assert "smaller bucket_cap_mb" not in str(found)
