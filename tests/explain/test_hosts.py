"""Programs without a device: places of collectives and loops, and times that nothing shows."""

import pytest

import overlap
from overlap.errors import UsageError
from tests.explain.profiles import AUTOGRAD, Recording
from tests.explain.test_causes import LINE, costs, recorded


def host(tmp_path, plant, **more):
    return recorded(tmp_path, plant, device="", **more)


def in_a_loop(rec, start):
    """500 operators of 10 us, with 6 us of Python between them."""
    rec.frame("train.py(12): step", start, start + 10_000)
    for at in range(start, start + 8_000, 16):
        rec.op("aten::item", at, at + 10)
    rec.op("aten::mm", start + 8_000, start + 10_000)


def test_a_loop_over_small_operators_comes_first(tmp_path):
    found = host(tmp_path, in_a_loop)
    assert found.verdict == (
        f"step 10.0 ms: compute 7.0; 3.0 (30%) Python between operators ({LINE}); try: replace the loop by operators "
        "on the whole batch (or torch.vmap, torch.compile) (500 calls of aten::item, 10 us each)"
    )
    assert found.advice[0].place == f"aten::item at {LINE} (8 ms with the Python between them)"


def test_few_or_long_operators_are_no_loop(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(12): step", start, start + 10_000)
        for at in range(start, start + 10_000, 100):
            rec.op("aten::mm", at, at + 100)

    assert not host(tmp_path, plant).advice


def test_a_collective_of_gloo_has_the_line_of_its_call(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(30): average", start, start + 10_000)
        rec.op("aten::mm", start, start + 2_000)
        rec.op("c10d::allreduce_", start + 2_000, start + 2_100)
        rec.add("user_annotation", "gloo:all_reduce", start + 2_100, start + 10_000, tid=5)

    found = host(tmp_path, plant, world=2)
    assert costs(found) == {"compute": 2_000, "communication": 8_000}
    assert found.advice[0].place == "c10d::allreduce_ at train.py:30 (def average)"


def test_a_call_of_a_message_that_blocks_communicates(tmp_path):
    def plant(rec, start):
        rec.op("aten::mm", start, start + 2_000)
        rec.op("c10d::recv_", start + 2_000, start + 10_000)
        rec.add("user_annotation", "gloo:recv", start + 9_000, start + 9_900)

    assert costs(host(tmp_path, plant, world=2)) == {"compute": 2_000, "communication": 8_000}


def test_small_all_gathers_are_not_taken_for_fsdp(tmp_path):
    def plant(rec, start):
        rec.op("aten::mm", start, start + 2_000)
        dims = {"Input Dims": [[1024]], "Input type": ["float"]}
        rec.add("user_annotation", "gloo:all_gather", start + 2_000, start + 10_000, tid=5, **dims)

    (item,) = host(tmp_path, plant, world=2).advice
    assert "FSDP" not in item.change


def test_an_optimizer_that_updates_parameters_one_by_one(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(12): step", start, start + 10_000)
        rec.op("aten::mm", start, start + 2_000)
        rec.note("Optimizer.step#AdamW.step", start + 2_000, start + 10_000)
        for at in range(start + 2_000, start + 10_000, 16):
            rec.op("aten::add_", at, at + 6)

    found = host(tmp_path, plant)
    assert found.advice[0].change.startswith("fused=True")
    assert found.advice[0].place == "Optimizer.step#AdamW.step (8 ms)"
    assert not [item for item in found.advice if "out of the loop" in item.change]


def test_a_data_loader_with_processes_needs_more_of_them(tmp_path):
    def plant(rec, start):
        rec.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, start + 8_000)
        rec.op("aten::mm", start + 8_000, start + 10_000)

    assert host(tmp_path, plant).advice[0].change.startswith("more num_workers")


def test_compiling_and_collecting_are_no_compute(tmp_path):
    """Their events are operators of the host in files of PyTorch."""

    def plant(rec, start):
        rec.op("dynamo", start, start + 6_000)
        rec.op("_compile.compile_inner (dynamo_timed)", start + 100, start + 5_900)
        rec.op("gc (dynamo_timed)", start + 200, start + 1_200)
        rec.op("aten::mm", start + 6_000, start + 10_000)

    found = host(tmp_path, plant)
    assert costs(found) == {"compile": 5_000, "gc": 1_000, "compute": 4_000}
    assert "TORCH_LOGS" in found.advice[0].change


def test_python_of_the_thread_with_frames_counts(tmp_path):
    """The thread of backward has more operators, and no Python."""

    def plant(rec, start):
        rec.frame("train.py(40): log", start, start + 10_000)
        rec.op("aten::mm", start, start + 1_000)
        rec.op("aten::mm", start + 1_000, start + 4_000, tid=AUTOGRAD)

    found = host(tmp_path, plant)
    assert costs(found) == {"compute": 4_000, "python": 6_000}
    assert "train.py:40 (def log)" in found.advice[0].place


def test_without_operators_and_functions_python_cannot_be_told(tmp_path):
    rec = Recording(device="")
    rec.note("ProfilerStep#1", 0, 10_000)
    rec.add("user_annotation", "gloo:all_reduce", 4_000, 10_000, tid=5)
    rec.op("aten::empty", 20_000, 20_001)
    assert costs(overlap.why(rec.write(tmp_path / "t.json"))) == {"communication": 6_000, "unrecorded": 4_000}


def test_a_folder_in_a_folder_is_read(tmp_path):
    folder = tmp_path / "unpacked"
    folder.mkdir()
    rec = Recording()
    rec.kernel(0, 1_000, launch=-5)
    rec.write(folder / "rank0.json")
    assert overlap.why(tmp_path).step_ns == 1_000_000


def test_other_files_of_a_folder_are_left_out_and_named(tmp_path):
    rec = Recording()
    rec.kernel(0, 1_000, launch=-5)
    rec.write(tmp_path / "rank0.json")
    (tmp_path / "config.json").write_text('{"layers": 12}')
    assert overlap.why(tmp_path).notes == ("left out, as they are no traces of PyTorch's profiler: config.json",)
    with pytest.raises(UsageError, match="name files of one kind"):
        overlap.why(tmp_path / "rank0.json", tmp_path / "config.json")


def test_the_thread_that_marks_the_steps_shows_what_a_program_does(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(40): log", start, start + 10_000)
        rec.op("aten::mm", start, start + 1_000)
        for depth in range(3):  # another thread is in its functions all the time
            rec.frame(f"watch.py({depth}): watch", start, start + 10_000, tid=AUTOGRAD)

    found = host(tmp_path, plant)
    assert found.causes[0].places == ("train.py:40 (def log) (9 ms)",)


def test_modules_of_threads_without_operators_do_not_count_as_python(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(40): serve", start, start + 10_000)
        rec.frame("nn.Module: Linear_0", start + 1_000, start + 9_000, tid=AUTOGRAD)

    found = host(tmp_path, plant)
    assert costs(found) == {"unrecorded": 8_000, "python": 2_000}
    assert "modules run on 1 thread without recorded operators: experimental_config" in found.verdict


def test_a_note_of_the_user_is_a_part_of_a_place(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(40): log", start, start + 10_000)
        rec.note("fetch_from_s3", start, start + 9_000)
        rec.op("aten::mm", start + 9_000, start + 10_000)

    assert host(tmp_path, plant).causes[0].places == ("fetch_from_s3 at train.py:40 (def log) (9 ms)",)


def test_an_operator_has_the_time_of_a_function_only_if_it_takes_nearly_all(tmp_path):
    def plant(rec, start):
        rec.frame("train.py(12): step", start, start + 10_000)
        rec.op("aten::mm", start, start + 8_000)
        rec.op("aten::add", start + 8_000, start + 10_000)

    assert host(tmp_path, plant).causes[0].places == ("train.py:12 (def step) (10 ms: aten::mm, aten::add)",)


def test_a_small_cause_without_a_gain_is_no_advice(tmp_path):
    rec, start = Recording(device=""), 0
    for number, length in enumerate((10_000, 14_000, 10_000)):
        rec.note(f"ProfilerStep#{number}", start, start + length)
        rec.frame("train.py(12): step", start, start + length)
        rec.op("aten::mm", start, start + length - 600)
        start += length
    found = overlap.why(rec.write(tmp_path / "t.json"))
    assert found.cost_ns("python") == 600_000
    assert not found.advice


def test_a_longer_step_is_named_with_what_takes_longer_in_it(tmp_path):
    rec, start = Recording(device=""), 0
    for number, waits in enumerate((0, 0, 9_000, 0)):
        rec.note(f"ProfilerStep#{number}", start, start + 10_000 + waits)
        rec.op("aten::mm", start, start + 10_000)
        if waits:
            rec.frame("train.py(40): validate", start + 10_000, start + 19_000)
        start += 10_000 + waits
    assert overlap.why(rec.write(tmp_path / "t.json")).notes == (
        "1 of 4 steps takes half as long again as this one, or more: step 2 takes 19 ms, of which Python between "
        "operators is 9 ms more, the largest part at train.py:40 (def validate) (9 ms)",
    )


def test_what_takes_long_beside_kernels_is_named(tmp_path):
    def plant(rec, start):
        rec.kernel(start, start + 9_000, launch=start - 5)
        rec.op("aten::mm", start + 9_000, start + 9_999)
        rec.kernel(start + 9_990, start + 10_000, launch=start + 9_980)

    assert "; 1.0 (10%) the host launches too slowly (aten::mm); try: " in recorded(tmp_path, plant).verdict
