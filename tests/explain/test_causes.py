"""Planted causes in files of PyTorch's profiler: each is found, with its place, and all nanoseconds have one cause."""

import pytest

import overlap
from tests.explain.profiles import AUTOGRAD, Recording

FILE = "train.py(12): step"
LINE = "train.py:12 (def step)"


def recorded(tmp_path, plant, *, steps=3, length=10_000, **header):
    """Record steps, each of which `plant(recording, start)` fills with events, and explain them."""
    rec = Recording(**header)
    for number in range(steps):
        start = 1_000 + number * length
        rec.step(number, start, start + length)
        plant(rec, start)
    return overlap.why(rec.write(tmp_path / "trace.json"))


def costs(found):
    """Return the causes of the shown step in microseconds; they add up to the step."""
    times = {cause.cause: cause.duration_ns for cause in found.causes}
    assert sum(times.values()) == found.step_ns
    return {cause: ns / 1000 for cause, ns in times.items()}


def busy(rec, start, end):
    """One long kernel, launched early."""
    rec.kernel(start, end, launch=start - 5)


def busy_around(rec, start):
    """Kernels in the first 2 ms and in the last one, launched by what ends before it."""
    busy(rec, start, start + 2_000)
    rec.op("aten::mm", start + 8_990, start + 9_000)
    busy(rec, start + 9_000, start + 10_000)


def launch_bound(rec, start):
    rec.frame(FILE, start, start + 10_000)
    rec.frame("nn.Module: Block_3", start, start + 10_000)
    for at in range(start, start + 10_000, 100):
        rec.op("aten::add", at, at + 98)
        rec.kernel(at + 90, at + 100, launch=at + 85)


def synchronised(rec, start):
    rec.frame(FILE, start, start + 10_000)
    rec.kernel(start, start + 6_000, launch=start - 5)
    rec.op("aten::item", start + 5, start + 6_000)
    rec.call("cudaStreamSynchronize", start + 10, start + 6_000)
    rec.op("aten::mm", start + 6_900, start + 7_010)
    rec.kernel(start + 7_000, start + 10_000)


def loading(rec, start):
    busy_around(rec, start)
    rec.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start + 1_000, start + 8_990)
    rec.frame("data.py(7): __getitem__", start + 1_001, start + 8_980)


def slow_python(rec, start):
    busy_around(rec, start)
    rec.frame("train.py(40): log", start + 10, start + 8_990)
    rec.frame("<built-in function sleep>", start + 20, start + 8_980)


def collecting(rec, start):
    slow_python(rec, start)
    rec.frame("<built-in function collect>", start + 2_000, start + 8_500)


def allocating(rec, start):
    busy(rec, start, start + 2_000)
    rec.op("aten::empty", start + 1_990, start + 8_990)
    rec.call("cudaMalloc", start + 2_000, start + 8_900)
    busy(rec, start + 9_000, start + 10_000)


def compiling(rec, start):
    busy_around(rec, start)
    rec.frame("torch/_dynamo/convert_frame.py(500): _compile", start + 1_500, start + 8_990)


def capturing(rec, start):
    busy(rec, start, start + 2_000)
    rec.call("cudaStreamBeginCapture", start + 2_000, start + 2_010)
    rec.call("cudaLaunchKernel", start + 3_000, start + 3_005)
    rec.call("cudaStreamEndCapture", start + 8_000, start + 8_010)
    rec.op("aten::mm", start + 8_010, start + 9_000)
    busy(rec, start + 9_000, start + 10_000)


def copying(rec, start):
    rec.op("aten::to", start - 10, start + 4_000)
    rec.copy(start, start + 4_000, launch=start - 5)
    rec.kernel(start + 4_000, start + 10_000, launch=start - 1)


def small_collectives(rec, start):
    for at in range(start, start + 10_000, 100):
        rec.op("torch::autograd::AccumulateGrad", at - 60, at - 50)
        rec.kernel(at, at + 60, launch=at - 55)
        rec.collective(at + 60, at + 100, count=1024, launch=at - 54)


def queued(rec, start):
    for at in range(start, start + 10_000, 1_000):
        rec.kernel(at, at + 995, launch=start - 5)


def lost_launch(rec, start):
    busy(rec, start, start + 3_000)
    busy(rec, start + 9_000, start + 10_000)
    rec.events[-1]["args"]["correlation"] = 0  # the profiler dropped its launch
    assert rec.events[-2]["name"] == "cudaLaunchKernel"


def other_stream(rec, start):
    """Kernels of one stream wait for events of another one, each for 90 us, and are queued long before."""
    for number in range(10):
        at, call = start + 1_000 * number, start - 300 + 20 * number
        rec.call("cudaStreamWaitEvent", call, call + 1)
        rec.kernel(at, at + 400, launch=call + 2)
        rec.call("cudaStreamWaitEvent", call + 5, call + 6)
        rec.kernel(at + 490, at + 1_000, launch=call + 7, stream=8)


def loading_code(rec, start):
    busy(rec, start, start + 2_000)
    rec.frame(FILE, start, start + 10_000)
    rec.op("aten::conv2d", start + 1_990, start + 9_000)
    rec.call("cuModuleLoadData", start + 2_000, start + 8_900)
    busy(rec, start + 9_000, start + 10_000)


def autotuning(rec, start):
    busy_around(rec, start)
    rec.frame(FILE, start, start + 10_000)
    rec.frame("triton/testing.py(101): do_bench", start + 1_900, start + 8_990)


def dynamic_shapes(rec, start):
    rec.frame(FILE, start, start + 10_000)
    rec.kernel(start, start + 6_000, launch=start - 5)
    rec.op("aten::nonzero", start + 5, start + 6_100)
    rec.kernel(
        start + 6_000, start + 6_010, launch=start + 10, name="Memcpy DtoH (Device -> Pageable)", cat="gpu_memcpy",
        call="cudaMemcpyAsync", length=6_050,
    )  # fmt: skip
    rec.op("aten::index", start + 6_100, start + 8_010)
    rec.kernel(start + 8_000, start + 10_000)


def cloning(rec, start):
    rec.frame(FILE, start - 10, start + 10_000)
    rec.op("aten::clone", start - 8, start + 3_000)
    rec.copy(start, start + 3_000, launch=start - 5, kind="Memcpy DtoD (Device -> Device)")
    rec.kernel(start + 3_000, start + 10_000, launch=start - 1)


def gathering(rec, start):
    rec.frame("fsdp.py(9): unshard", start - 10, start + 10)
    rec.op("c10d::_allgather_base_", start - 9, start)
    rec.collective(start, start + 4_000, op="_allgather_base", count=1 << 28, launch=start - 5)
    rec.kernel(start + 4_000, start + 10_000, launch=start - 2)


def symmetric_memory(rec, start):
    for at in range(start, start + 10_000, 1_000):
        rec.kernel(at, at + 700, launch=start - 50)
        rec.kernel(at + 700, at + 1_000, launch=start - 40, name="multimem_all_reduce_kernel<c10::BFloat16, 16>")


def between_graphs(rec, start):
    """The host prepares inputs for 4 ms between two graphs."""
    rec.frame(FILE, start - 10, start + 10_000)
    correlation = rec.call("cudaGraphLaunch", start - 5, start)
    rec.add("kernel", "gemm", start, start + 3_000, pid=0, tid=7, correlation=correlation)
    rec.op("aten::copy_", start + 1, start + 6_990)
    correlation = rec.call("cudaGraphLaunch", start + 6_995, start + 6_999)
    for at in range(start + 7_000, start + 10_000, 500):
        rec.add("kernel", "gemm", at, at + 500, pid=0, tid=7, correlation=correlation)


CASES = {
    "launch": (launch_bound, {"launch": 9_000, "compute": 1_000}, f"Block_3, aten::add at {LINE}"),
    "sync": (synchronised, {"compute": 9_000, "sync": 995, "launch": 5}, f"aten::item at {LINE}"),
    "data": (loading, {"compute": 3_000, "data": 6_990, "launch": 10}, "data.py:7 (def __getitem__)"),
    "python": (slow_python, {"compute": 3_000, "python": 6_990, "launch": 10}, "train.py:40 (def log)"),
    "gc": (collecting, {"compute": 3_000, "gc": 6_500, "python": 490, "launch": 10}, "train.py:40 (def log)"),
    "allocator": (allocating, {"compute": 3_000, "allocator": 6_900, "launch": 100}, "aten::empty"),
    "compile": (compiling, {"compute": 3_000, "compile": 6_990, "launch": 10}, ""),
    "capture": (capturing, {"compute": 3_000, "capture": 6_010, "launch": 990}, ""),
    "copy": (copying, {"compute": 6_000, "copy": 4_000}, "Pageable -> Device under aten::to"),
    "communication": (small_collectives, {"compute": 6_000, "communication": 4_000}, "100 all_reduce"),
    "queue": (queued, {"compute": 9_950, "queue": 50}, ""),
    "event": (other_stream, {"compute": 9_100, "event": 900}, ""),
    "startup": (loading_code, {"compute": 3_000, "startup": 6_900, "launch": 100}, f"aten::conv2d at {LINE}"),
    "compile by Triton": (autotuning, {"compute": 3_000, "compile": 6_990, "launch": 10}, LINE),
    "sync by a shape": (
        dynamic_shapes,
        {"compute": 8_000, "sync": 1_985, "copy": 10, "launch": 5},
        f"aten::nonzero at {LINE}",
    ),
    "copy on the device": (cloning, {"compute": 7_000, "copy": 3_000}, f"Device -> Device under aten::clone at {LINE}"),
    "communication of FSDP": (gathering, {"compute": 6_000, "communication": 4_000}, "1 all_gather, 1 GiB"),
    "communication by symmetric memory": (
        symmetric_memory,
        {"compute": 7_000, "communication": 3_000},
        "10 all_reduce",
    ),
    "launch between graphs": (between_graphs, {"compute": 6_000, "launch": 4_000}, f"aten::copy_ at {LINE}"),
    "unrecorded": (lost_launch, {"compute": 4_000, "unrecorded": 6_000}, ""),
}


@pytest.mark.parametrize("cause", CASES)
def test_a_planted_cause_takes_its_time_and_has_its_place(tmp_path, cause):
    plant, expected, place = CASES[cause]
    found = recorded(tmp_path, plant)
    assert costs(found) == expected
    shown = next(each for each in found.causes if each.cause == cause.split()[0])
    assert place in next(iter(shown.places), "")


ADVICE = {
    "launch": "reduce-overhead", "sync": ".item()", "data": "num_workers", "python": "out of the loop",
    "gc": "gc.freeze", "allocator": "expandable_segments", "compile": "TORCH_LOGS", "capture": "schedule",
    "copy": "pin_memory", "communication": "bucket_cap_mb", "startup": "schedule", "compile by Triton": "TORCH_LOGS",
    "sync by a shape": "torch.where", "copy on the device": "clone", "communication of FSDP": "prefetch",
    "communication by symmetric memory": "begin it earlier", "launch between graphs": "let graphs hold more",
    "event": "wait_stream",
}  # fmt: skip


@pytest.mark.parametrize("cause", ADVICE)
def test_the_first_advice_is_for_the_planted_cause_and_gains_no_more_than_it_takes(tmp_path, cause):
    found = recorded(tmp_path, CASES[cause][0])
    item, kind = found.advice[0], cause.split()[0]
    assert (item.cause, ADVICE[cause] in item.change) == (kind, True)
    taken_ns = max(found.per_step(kind).values())
    assert item.gain_most_ns <= found.step_ns - found.cost_ns("compute")
    assert item.gain_least_ns <= item.gain_most_ns
    assert kind in ("capture", "startup") or item.gain_most_ns == taken_ns


def test_a_gap_is_the_time_of_each_operator_in_it(tmp_path):
    """The middle of the gap is in the shorter one."""

    def plant(rec, start):
        busy(rec, start, start + 1_000)
        rec.op("aten::first", start + 1_000, start + 5_400)
        rec.op("aten::second", start + 5_450, start + 6_000)
        rec.op("aten::first", start + 6_050, start + 9_000)
        rec.kernel(start + 9_000, start + 10_000, launch=start + 8_995)

    found = recorded(tmp_path, plant)
    assert costs(found) == {"compute": 2_000, "launch": 8_000}
    assert found.causes[0].places == ("aten::first (7.35 ms)", "aten::second (550 us)")


def test_a_place_is_the_deepest_function_that_most_of_the_time_is_in(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(12): step", start, start + 10_000)
        busy(rec, start, start + 1_000)
        for number, (low, high) in enumerate(((1_000, 4_000), (4_000, 6_000), (6_000, 9_000))):
            rec.frame(f"nn.Module: Block_{number}", start + low, start + high)
            rec.frame("layer.py(7): forward", start + low, start + high)
            rec.frame(f"inner.py({number}): part", start + low, start + high)
            rec.op("aten::add", start + low, start + high)
        rec.kernel(start + 9_000, start + 10_000, launch=start + 8_995)

    found = recorded(tmp_path, plant)
    assert found.causes[0].places == ("Block, aten::add at layer.py:7 (def forward) (8 ms)",)


def test_a_device_that_is_busy_gets_no_advice(tmp_path):
    found = recorded(tmp_path, queued)
    assert (found.advice, found.undecided) == ((), ())
    assert found.verdict.startswith("step 10.0 ms: compute 9.9 (")


def test_one_step_promises_no_gain(tmp_path):
    found = recorded(tmp_path, launch_bound, steps=1)
    assert (found.advice[0].gain_least_ns, found.advice[0].gain_most_ns) == (None, None)
    assert any(each.startswith("gains: one step") for each in found.undecided)


def test_a_gain_within_the_noise_of_steps_is_not_given(tmp_path):
    rec, start = Recording(), 1_000
    for number, extra in enumerate((0, 3_000, 0)):  # a step that takes longer for no planted reason
        rec.step(number, start, start + 10_000 + extra)
        busy(rec, start, start + 8_500 + extra)
        rec.op("aten::mm", start + 8_500 + extra, start + 9_990 + extra)
        rec.kernel(start + 9_990 + extra, start + 10_000 + extra, launch=start + 9_980 + extra)
        start += 10_000 + extra
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert [(item.cause, item.gain_most_ns) for item in found.advice] == [("launch", None)]
    assert "steps differ by 3 ms anyway" in found.advice[0].gain_text


def test_a_wait_with_nothing_to_do_after_it_is_harmless(tmp_path):
    def plant(rec, start):
        rec.kernel(start, start + 10_000, launch=start - 5)
        rec.op("aten::item", start, start + 9_000)
        rec.call("cudaStreamSynchronize", start + 5, start + 9_000)

    found = recorded(tmp_path, plant)
    assert costs(found) == {"compute": 10_000}
    assert not found.advice


def test_time_after_a_wait_is_the_waits_only_as_far_as_the_host_had_been_ahead(tmp_path):
    def plant(rec, start):
        rec.kernel(start, start + 1_000, launch=start - 5)
        rec.op("aten::item", start, start + 1_000)
        rec.call("cudaStreamSynchronize", start + 500, start + 1_000)  # blocked for 500 us
        rec.op("aten::sort", start + 1_000, start + 9_000)
        rec.kernel(start + 9_000, start + 10_000, launch=start + 8_995)

    assert costs(recorded(tmp_path, plant)) == {"compute": 2_000, "sync": 500, "launch": 7_500}


def test_a_backward_operator_has_the_place_of_its_forward(tmp_path):
    def plant(rec, start):
        rec.frame("model.py(3): forward", start - 400, start - 100)
        rec.frame("nn.Module: Linear_0", start - 390, start - 110)
        rec.op("aten::linear", start - 380, start - 120, **{"Sequence number": 5})
        rec.kernel(start, start + 100, launch=start - 125)
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        rec.op(name, start + 100, start + 9_900, tid=AUTOGRAD, **{"Sequence number": 5})
        rec.kernel(start + 9_895, start + 10_000, launch=start + 9_890, tid=AUTOGRAD)

    found = recorded(tmp_path, plant, steps=1)
    assert found.causes[0].places[0].startswith("the backward of Linear_0, aten::linear at model.py:3 (def forward)")


def test_kernels_belong_to_the_step_that_launched_them(tmp_path):
    """Without marks on the device: the host is a step ahead of it."""
    rec = Recording()
    for number in range(3):
        rec.note(f"ProfilerStep#{number}", 1_000 * number, 1_000 * number + 1_000)
        rec.kernel(5_000 * number + 900, 5_000 * number + 5_900, launch=1_000 * number + 500)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert found.steps_ns == {"0": 5_000_000, "1": 5_000_000, "2": 5_000_000}
    assert costs(found) == {"compute": 5_000}


def test_holes_in_a_graph_are_nodes_that_are_not_recorded(tmp_path):
    rec = Recording()
    correlation = rec.call("cudaGraphLaunch", 100, 200)
    for start, end in ((150, 1_000), (5_000, 6_000)):
        rec.add("kernel", "gemm", start, end, pid=0, tid=7, correlation=correlation)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found) == {"unrecorded": 4_000, "compute": 1_850}
    assert "cannot be told" in found.verdict


def test_work_from_before_the_recording_is_not_blamed_on_the_host(tmp_path):
    rec = Recording()
    rec.kernel(10, 20, launch=0)
    rec.kernel(460_000, 465_000, launch=15)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found) == {"unrecorded": 459_980, "compute": 5_010}
    assert found.verdict == (
        "whole recording 465.0 ms: compute 5.0; 460.0 (99%) nothing is recorded, and it cannot be told why: recording "
        "began in the middle: 460 ms of the device's time are not recorded, before work that was launched as recording "
        "began"
    )


def test_queued_work_that_nothing_explains_is_not_explained(tmp_path):
    """It was launched long after recording began."""
    rec = Recording()
    rec.kernel(10, 20, launch=0)
    rec.kernel(5_000, 6_000, launch=4_990)
    rec.kernel(46_000, 47_000, launch=5_000)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert "nothing shows what the device waited for" in found.verdict


def test_operators_of_the_host_are_no_compute_of_a_device_without_kernels(tmp_path):
    rec = Recording()
    rec.note("ProfilerStep#1", 0, 1_000)
    rec.op("aten::mm", 0, 100)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found) == {"compute": 100, "unrecorded": 900}
    assert "no kernel of its device is recorded" in found.verdict


def test_a_start_is_said_to_be_one(tmp_path):
    rec = Recording()
    rec.op("aten::to", 0, 6_000_000)
    rec.call("cudaDeviceGetStreamPriorityRange", 100, 5_000_000)
    rec.call("cudaMalloc", 5_000_000, 5_900_000)
    rec.kernel(6_000_000, 6_100_000)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found)["startup"] == 4_999_900
    assert "start-up" in found.verdict
    assert "record later" in found.verdict


def test_graphs_that_are_launched_late_get_no_advice_to_use_graphs(tmp_path):
    def plant(rec, start):
        for at in range(start, start + 10_000, 1_000):
            correlation = rec.call("cudaGraphLaunch", at + 480, at + 500)
            for kernel in range(at + 500, at + 1_000, 50):
                rec.add("kernel", "gemm", kernel, kernel + 50, pid=0, tid=7, correlation=correlation)
            rec.op("aten::sample", at, at + 480)

    found = recorded(tmp_path, plant)
    assert costs(found) == {"compute": 5_000, "launch": 5_000}
    assert "let graphs hold more of the step" in found.advice[0].change
    assert "launch-bound" not in found.verdict


def test_a_compiled_model_that_runs_is_not_compiling(tmp_path):
    def plant(rec, start):
        launch_bound(rec, start)
        rec.frame("torch/_inductor/codecache.py(1132): __call__", start, start + 10_000)

    assert "compile" not in costs(recorded(tmp_path, plant))


def test_a_step_has_a_mark_on_each_stream(tmp_path):
    rec = Recording()
    rec.step(1, 0, 1_000)
    rec.add("gpu_user_annotation", "ProfilerStep#1", 400, 600, pid=0, tid=20)
    busy(rec, 0, 1_000)
    assert overlap.why(rec.write(tmp_path / "t.json")).step_ns == 1_000_000


def test_a_second_device_is_named(tmp_path):
    rec = Recording()
    busy(rec, 0, 1_000)
    rec.add("kernel", "gemm", 0, 500, pid=1, tid=7, correlation=99)
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert costs(found) == {"compute": 1_000}
    assert "the file has 2 devices: only the one that did most counts" in found.undecided


def test_a_slow_wire_is_held_against_the_links_of_the_device(tmp_path):
    def plant(rec, start):
        rec.collective(start, start + 4_000, count=1 << 24, size=8, launch=start - 5)
        rec.kernel(start + 4_000, start + 10_000, launch=start - 2)

    item = recorded(tmp_path, plant, world=8).advice[0]
    assert "29.4 GB/s of bus bandwidth, its links 450" in item.evidence
    assert "NCCL_DEBUG=INFO" in item.change
    other = recorded(tmp_path, plant, world=16).advice[0]  # on two hosts or more
    assert other.evidence.endswith("29.4 GB/s of bus bandwidth")
    assert "begin it earlier" in other.change


def test_advice_names_the_most_exposed_call_and_what_waits_for_it(tmp_path):
    def plant(rec, start):
        rec.op("c10d::first", start - 20, start - 15)
        rec.collective(start, start + 1_000, count=1 << 22, launch=start - 18)
        rec.op("c10d::second", start - 14, start - 10)
        rec.collective(start + 1_000, start + 4_000, count=1 << 22, launch=start - 12)
        rec.op("aten::mm", start - 8, start - 1)
        rec.kernel(start + 4_000, start + 10_000, launch=start - 5)

    item = recorded(tmp_path, plant, device="").advice[0]
    assert item.place == "c10d::second"
    assert item.evidence.endswith("; for the longest waits aten::mm")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("cudaLaunchKernel", "3 of 9 launches of kernels have no recorded kernels"),
        ("cudaGraphLaunch", "3 of 3 launches of CUDA graphs have no recorded kernels"),
    ],
)
def test_launches_whose_kernels_are_not_recorded_are_not_the_hosts_fault(tmp_path, call, told):
    def plant(rec, start):
        busy(rec, start, start + 2_000)
        rec.op("aten::add", start + 1_000, start + 2_600)
        rec.call(call, start + 2_500, start + 2_510)  # its kernels run until 8,900
        rec.op("aten::mm", start + 8_900, start + 9_000)
        busy(rec, start + 9_000, start + 10_000)

    found = recorded(tmp_path, plant)
    assert costs(found) == {"compute": 3_000, "unrecorded": 6_495, "launch": 505}
    assert told in found.verdict


def test_a_call_of_the_driver_inside_one_of_the_runtime_is_the_same_launch(tmp_path):
    def plant(rec, start):
        for at in range(start, start + 10_000, 1_000):
            rec.call("cudaLaunchKernel", at + 80, at + 100)
            rec.kernel(at + 110, at + 1_100, launch=at + 85, call="cuLaunchKernel")

    found = recorded(tmp_path, plant)
    assert "unrecorded" not in costs(found)
    assert not [each for each in found.undecided if "launches" in each]


def test_a_copy_that_holds_the_host_before_it_begins_is_advised_by_its_memory(tmp_path):
    def plant(rec, start):
        rec.op("aten::to", start, start + 4_000)
        rec.copy(start + 100, start + 3_900, launch=start + 50, length=3_900)
        rec.op("aten::mm", start + 4_000, start + 4_100)
        rec.kernel(start + 4_100, start + 10_000, launch=start + 4_050)

    assert recorded(tmp_path, plant).advice[0].change == "pin_memory() and non_blocking=True"


def test_a_place_of_computing_is_a_function_with_its_operators(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(12): step", start - 60, start - 40)
        rec.frame("mask.py(3): positions", start - 58, start - 42)
        for number, op in enumerate(("aten::sin", "aten::cos", "aten::where")):
            rec.op(op, start - 57 + 5 * number, start - 53 + 5 * number)
            at = start + 3_000 * number
            rec.kernel(at, at + 3_000 + 1_000 * (number == 2), launch=start - 56 + 5 * number)

    found = recorded(tmp_path, plant)
    (cause,) = found.causes
    assert cause.places == ("mask.py:3 (def positions) (10 ms: aten::where, aten::sin, aten::cos)",)
    assert "mask.py:3 (def positions))" in found.verdict


def test_a_backward_belongs_to_the_last_operator_with_its_number(tmp_path):
    """An operator without a node has the number of the next one that has."""

    def plant(rec, start):
        number = start // 1_000
        rec.op("aten::view", start - 90, start - 85, **{"Sequence number": number})
        rec.op("aten::mm", start - 80, start - 60, **{"Sequence number": number})
        name = "autograd::engine::evaluate_function: MmBackward0"
        rec.op(name, start - 50, start - 40, tid=AUTOGRAD, **{"Sequence number": number})
        rec.kernel(start, start + 10_000, launch=start - 45, tid=AUTOGRAD)

    assert recorded(tmp_path, plant).causes[0].places == ("the backward of aten::mm (10 ms)",)


def test_events_that_are_left_out_are_the_reason_of_what_they_hide(tmp_path):
    def plant(rec, start):
        rec.kernel(start, start + 1_000, launch=start - 5)
        rec.kernel(start + 8_000, start + 2_000, launch=start + 1_500)  # ends before it starts
        rec.kernel(start + 9_000, start + 10_000, launch=start + 8_990)

    assert "it cannot be told why: 3 events end before they start: left out" in recorded(tmp_path, plant).verdict
