"""Unchanged programs of PyTorch with many ranks in this process."""

import copy
import os
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import UsageError
from overlap.testing import Ranks, RanksFailed

torch = pytest.importorskip("torch", reason="torch is not installed")
dist = torch.distributed

import overlap.torch  # noqa: E402
from tests.errors import error_of  # noqa: E402

HERE = Path(__file__).parent / "programs"
ROOT = str(Path(__file__).parents[2])


@pytest.mark.slow
def test_ddp_has_the_same_weights_on_all_ranks_and_those_of_one_process() -> None:
    ranks = Ranks(HERE)
    run, alone = ranks.program("ddp.py", ranks=8), ranks.program("ddp.py", ranks=1)
    assert run.same("model weights")
    assert run.equals(alone, bound=1e-6)
    assert not run.equals(alone)
    assert run.output[3].startswith("rank 3 of 8 by gloo: ")
    assert 0 < run.exposed < 1
    assert run.sent_bytes > 5 * 4 * (32 * 64 + 64 + 64 * 10 + 10)  # a gradient for each step
    assert run.peak_bytes > 4 * (32 * 64 + 64 * 10)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_and_any_seed_the_same_weights() -> None:
    def run(seed):
        return Ranks(HERE).program("ddp.py", ["--steps", "2"], ranks=4, seed=seed)

    assert run(0).trace == run(0).trace
    assert run(5).trace == run(5).trace
    assert Ranks().repeats(run, seeds=6)


@pytest.mark.slow
def test_fsdp_dtensor_pipelining_and_checkpoints(tmp_path: Path) -> None:
    runs = [Ranks(HERE).program("sharded.py", [str(tmp_path / str(n))], ranks=n) for n in (2, 4)]
    assert all(run.same() for run in runs)
    assert runs[0].equals(runs[1], bound=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "local_sgd.py", "uneven_inputs.py", "uneven_rounds.py", "loss_parallel.py", "static_graph.py", "fsdp1.py",
        "fsdp1_saves.py", "zero.py", "stores.py", "profiled.py", "saves_in_threads.py",
    ],
)  # fmt: skip
def test_right_programs_are_well_on_several_seeds(program) -> None:
    assert not Ranks(HERE).program(program, ranks=4, seeds=3).verdicts


def test_ranks_of_diloco_have_the_same_weights_at_the_end_and_other_ones_between() -> None:
    run = Ranks(HERE).program("diloco.py", ranks=2)
    assert run.same()
    told = "weights differ: after update 1 (diloco.py:26), and not before, 'weight' differs: rank 1 ("
    assert run.same("model weights after each update").problem.startswith(told)
    left = Ranks(HERE).program("diloco.py", ["--left", "1", "--lr", "0.2"], ranks=2).same().problem
    assert left.startswith(told)
    assert left.endswith("; the optimizer of rank 1 has lr = 0.2, that of rank 0 0.1")
    with pytest.raises(
        UsageError, match=r"same: expected 'model weights', 'model weights after each update', 'results'; got"
    ):
        run.same("weights")


def test_parts_of_the_parameters_of_fsdp1_are_not_compared() -> None:
    assert Ranks(HERE).program("fsdp1.py", ranks=2).same()


def test_a_number_of_the_store_may_be_old_when_the_next_one_is_written() -> None:
    run = Ranks(HERE).program("takes_jobs_twice.py", ranks=2, check=False)
    assert [each.text for each in run.verdicts] == [
        "rank 0 failed at takes_jobs_twice.py:16: AssertionError: a job was done twice"
    ]


def test_an_operation_that_ddp_never_waits_for_is_in_flight_and_its_own() -> None:
    """With gloo, too, ranks end with other weights if such gradients are large: DDP throws the handle away."""
    run = Ranks(HERE).program("delayed.py", ranks=2, check=False)
    assert [str(each) for each in run.verdicts[:1]] == [
        "buffer in flight: rank 0 reads a tensor at delayed.py:19 (add_) while all_reduce #5 of group 'world' "
        "(delayed.py:18) is under way: DistributedDataParallel, for delay_all_reduce_named_params, never waits for it"
    ]


@pytest.mark.slow
def test_loss_parallel_of_one_rank_is_not_that_of_the_next() -> None:
    assert Ranks().function(enters_loss_parallel_in_turn, ranks=2).results == [True, False]


def enters_loss_parallel_in_turn():
    from torch.distributed.tensor.parallel import loss

    dist.init_process_group("gloo")
    with loss.loss_parallel() if dist.get_rank() == 0 else nullcontext():
        dist.barrier()
        return not loss.customized_loss_ops.keys().isdisjoint(loss.DTensor._op_dispatcher._custom_op_handlers)


@pytest.mark.slow
def test_64_ranks_of_ddp() -> None:
    run = Ranks(HERE).program("ddp.py", ranks=64)
    assert run.same()


def reduced(values):
    dist.init_process_group("gloo")
    total = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(total)
    return total


def test_a_function_returns_its_results() -> None:
    run = Ranks().function(reduced, [1.0, 2.0, 4.0], ranks=3)
    assert run.results == [7, 7, 7]
    assert run.same("results")


WITHOUT_COMPILER = """
import sys
import torch
from overlap.testing import Ranks

def reduced():
    torch.distributed.init_process_group("gloo")
    total = torch.ones(3) + 1
    torch.distributed.all_reduce(total)
    return total[0].item()

assert Ranks().function(reduced, ranks=2).results == [4, 4]
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_ranks_do_without_torchs_compiler_whose_import_takes_seconds(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(WITHOUT_COMPILER)
    run = subprocess.run(
        [sys.executable, script], env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=300
    )
    assert (run.stdout, run.returncode) == ("False\n", 0), run.stderr


@pytest.fixture
def compiler():
    """Drop what torch's compiler keeps, for it is the process's."""
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_frames_are_compiled_on_each_rank_and_their_functions_observed(compiler) -> None:
    run = Ranks(HERE).program("compiled.py", ranks=2)
    assert run.output == ["2 [6.0, 6.0, 6.0]\n"] * 2
    with pytest.raises(RanksFailed, match=r"rank 0 reads a tensor at compiled.py:18 \(mul\) while all_reduce #\d+ of"):
        Ranks(HERE).program("compiled.py", ["wrong"], ranks=2)


def passes_a_group(how):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group(range(3)), dist.new_group(range(3)), dist.new_group([0, 1])]
    chosen = {"one line": [groups[rank == 1]], "a part": [groups[2] if rank == 1 else None]}
    for group in chosen.get(how, groups[:2][:: -1 if rank == 1 else 1]):
        dist.all_reduce(torch.ones(1), group=group)
    while how == "for ever":
        dist.all_reduce(torch.ones(1), group=groups[rank == 1])
    dist.barrier()


CYCLE = "cycle: ranks 0-2 wait for each other and cannot go on: ranks 0, 2 in all_reduce #0 of group '0-2' (LINE)"
WRONG_GROUPS = {
    "one line": "wrong group: rank 1 waits in all_reduce #0 of group '0-2, number 2' (LINE), and never issues "
    "all_reduce #0 of group '0-2' (LINE), in which ranks 0, 2 wait for it: pass the same group on all ranks",
    "a part": "wrong group: rank 1 waits in all_reduce #0 of group '0-1' (LINE), and never issues all_reduce #0 of "
    "group 'world' (LINE), in which ranks 0, 2 wait for it: pass the same group on all ranks",
    "another order": CYCLE,
    "for ever": CYCLE,
}


@pytest.mark.everyday(3)
@pytest.mark.parametrize("how", [*[*WRONG_GROUPS][:3], pytest.param("for ever", marks=pytest.mark.slow)])
def test_a_wrong_group_is_no_other_order(how) -> None:
    run = Ranks().function(passes_a_group, how, ranks=3, check=False)
    line = f"test_torch.py:{passes_a_group.__code__.co_firstlineno + 6}"
    assert str(run.verdict).startswith(WRONG_GROUPS[how].replace("LINE", line))


def asks_for_any():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    truths = distribute_tensor(torch.tensor([False, False, True]), init_device_mesh("cpu", (2,)), [Shard(0)])
    return truths.any().full_tensor().item(), truths[:2].any().full_tensor().item()


@pytest.mark.slow
def test_any_of_a_distributed_tensor_is_a_sum_of_bool() -> None:
    assert Ranks().function(asks_for_any, ranks=2).results == [(True, False)] * 2


def exchanges(how):
    dist.init_process_group("gloo")
    x, rank = torch.ones(4), dist.get_rank()
    if how == "sizes":
        x = torch.ones(4 + 2 * rank)
    if rank == 0 or how == "sizes":
        sizes = {"uneven": [1, 3], "missed": [1, 3]}.get(how)
        dist.all_to_all_single(torch.empty_like(x), x, sizes, sizes)
    if how != "missed":
        dist.barrier()


MISMATCH = (
    "mismatch: rank 0 called all_to_all_single #0 of group 'world' (LINE) with float32 (4,), where rank 1 called "
)
EXCHANGES = {
    "even": f"{MISMATCH}barrier #0 of group 'world' (LAST) (operations differ)",
    "sizes": f"{MISMATCH}all_to_all_single #0 of group 'world' (LINE) with float32 (6,) (sizes differ)",
    "uneven": "cycle: ranks 0-1 wait for each other and cannot go on: rank 0 in all_to_all_single #0 from rank 1 "
    "(LINE), rank 1 in barrier #0 of group 'world' (LAST); call all_to_all_single on all of these ranks, with "
    "the sizes of its parts on all or on none",
    "missed": "unmatched: rank 1 has finished without the other end of all_to_all_single #0 from rank 1 (LINE), for "
    "which rank 0 waits",
}


@pytest.mark.everyday(4)
@pytest.mark.parametrize("how", EXCHANGES)
def test_an_all_to_all_single_is_called_so(how) -> None:
    run = Ranks().function(exchanges, how, ranks=2, check=False)
    first = exchanges.__code__.co_firstlineno
    told = EXCHANGES[how].replace("LINE", f"test_torch.py:{first + 7}").replace("LAST", f"test_torch.py:{first + 9}")
    assert str(run.verdict) == told


def reads_too_early(kind):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        open(f"{kind}.txt").close()
    time.sleep(0.1)
    if kind == "text":
        Path("text.txt").write_text("late")
    if kind == "saved":
        torch.save({}, "saved.txt")
    dist.barrier()


@pytest.mark.everyday(3)
@pytest.mark.parametrize(("kind", "line"), [("text", 7), ("saved", 9), ("never", None)])
def test_a_missing_file_names_the_rank_that_writes_it_later(kind, line) -> None:
    verdict = Ranks().function(reads_too_early, kind, ranks=2, check=False).verdict
    first = reads_too_early.__code__.co_firstlineno
    later = f"; rank 0 writes it later, at test_torch.py:{first + (line or 0)}: wait for that, by a barrier for example"
    assert verdict.text == (
        f"rank 1 failed at test_torch.py:{first + 4}: FileNotFoundError: [Errno 2] No such file or directory: "
        f"'{kind}.txt'{later if line else ''}"
    )


WARNS = """
import os, warnings
import torch.distributed as dist
dist.init_process_group("gloo")
warnings.warn(f"of rank {os.environ['RANK']}")
for _ in range(3):
    print("step")
    warnings.warn("of all")
dist.barrier()
assert dist.get_rank() != 1
"""


def test_warnings_come_once_and_before_the_verdict(tmp_path: Path) -> None:
    program = tmp_path / "warns.py"
    program.write_text(WARNS)
    error = error_of(RanksFailed, Ranks().program, program, ranks=3)
    assert str(error).splitlines()[:-1] == [
        f"rank 0 warned: {program}:5: UserWarning: of rank 0",
        f"ranks 0-2 warned: {program}:8: UserWarning: of all",
        f"rank 1 warned: {program}:5: UserWarning: of rank 1",
        f"rank 2 warned: {program}:5: UserWarning: of rank 2",
        "crash: rank 1 failed at warns.py:10: AssertionError",
        *["rank 1 printed: step"] * 3,
    ]
    assert str(error).splitlines()[-1].startswith("repeat: ")


def waits_for_a_process():
    """As torch's compiler does, which holds a lock meanwhile: another rank must not have its turn."""
    dist.init_process_group("gloo")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.001)  # by `time.sleep`
        TURNS.append(dist.get_rank())
    TURNS.append(dist.get_rank())
    dist.barrier()


TURNS: list[int] = []


def test_a_wait_for_a_process_outside_gives_no_other_rank_a_turn() -> None:
    TURNS.clear()
    Ranks().function(waits_for_a_process, ranks=2)
    assert TURNS == [0, 0, 1, 1]


def spawning():
    torch.multiprocessing.spawn(spawned, args=("gloo",), nprocs=3)


def spawned(rank, backend):
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:29999", rank=rank, world_size=3)
    dist.barrier()


def test_what_a_program_would_spawn_are_the_ranks() -> None:
    assert len(Ranks().function(spawning, ranks=3).record.issues) == 3
    with pytest.raises(RanksFailed, match="the program spawns 3 processes, and the test has 2 ranks"):
        Ranks().function(spawning, ranks=2)


# -- what programs do ------------------------------------------------------------------------------------------------


def exits():
    dist.init_process_group("gloo")
    raise SystemExit(3)


def exits_well():
    dist.init_process_group("gloo")
    dist.barrier()
    raise SystemExit


def prints_much():
    dist.init_process_group("gloo")
    dist.barrier()
    for _ in range(3000):
        print("x" * 100)


def never_ends():
    dist.init_process_group("gloo")
    dist.barrier()
    while dist.get_rank() == 1:
        pass
    dist.barrier()


def waits_for_ever():
    dist.init_process_group("gloo")
    dist.barrier()
    while True:
        time.sleep(100)


def says_nothing():
    return 1


def forks():
    dist.init_process_group("gloo")
    os.fork()


def uses_cuda():
    dist.init_process_group("gloo")
    torch.ones(1).cuda()


def says_another_rank():
    dist.init_process_group("gloo", rank=1, world_size=2)


def says_another_size():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)


def runs_ranks_of_its_own():
    overlap.run(None, ranks=2)


def uses_rpc():
    from torch.distributed import rpc

    rpc.init_rpc(f"worker{os.environ['RANK']}", rank=int(os.environ["RANK"]), world_size=2)


def uses_mpi():
    import mpi4py  # noqa: F401


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            exits,
            r"crash: rank \d failed at test_torch.py:\d+: ProgramExit: rank \d called sys.exit\(3\): it has failed",
        ),
        (never_ends, "never ends: rank 1 is still computing at test_torch.py:"),
        (waits_for_ever, "did not finish within timeout_s=1000"),
        (says_nothing, "no communication: the program has ended, and no rank has issued any operation"),
        (forks, "the program forks, and a fork of this process would have all ranks; load data in the program's own"),
        (uses_cuda, r"in a test all ranks compute on the CPU: choose the device by torch.cuda.is_available\(\)"),
        (says_another_rank, r"test_torch.py:\d+: ValueError: rank: the program says 1 on rank 0 of the test"),
        (says_another_size, r"test_torch.py:\d+: ValueError: world_size: the program says 3, and the test has 2 ranks"),
        (runs_ranks_of_its_own, "the program starts ranks of its own by overlap.run; test its async function"),
        (uses_rpc, r"refused: test_torch.py:\d+: the program communicates by torch.distributed.rpc"),
        (uses_mpi, "the program communicates by mpi4py, whose ranks are processes"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(function, told, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
    with pytest.raises(RanksFailed, match=told):
        Ranks().function(function, ranks=2, timeout_s=1000, real_timeout_s=2 if function is never_ends else 60)
    assert Ranks().function(reduced, [1.0, 2.0], ranks=2).results == [3, 3]  # the next one is clean


def test_programs_may_exit_print_much_and_name_files_that_do_not_exist() -> None:
    assert not Ranks().function(exits_well, ranks=2).verdicts
    run = Ranks().function(prints_much, ranks=2)
    assert run.output[0].endswith("\n... and 203000 more characters\n")
    with pytest.raises(UsageError, match=r"program: cannot read nothing.py: No such file"):
        Ranks().program("nothing.py", ranks=2)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("skip", """args: expected a list of words, got the text 'skip'; write args=["skip"]"""),
        ("--steps 5", """args: expected a list of words, got the text '--steps 5'; write args=["--steps", "5"]"""),
        ("it's", """args: expected a list of words, got the text "it's"; write args=["it's"]"""),
        (b"skip", """args: expected a list of words, got the text b'skip'; write args=["skip"]"""),
    ],
)
def test_arguments_of_a_program_are_a_list_and_no_text_whose_letters_it_would_get(args, told) -> None:
    assert str(error_of(UsageError, Ranks(HERE).program, "ddp.py", args, ranks=2)) == told


def changes_everything():
    dist.init_process_group("gloo")
    dist.barrier()
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    return os.environ["RANK"], os.environ["LOCAL_RANK"], random.random(), torch.rand(1).dtype


@pytest.mark.slow
def test_what_a_program_changes_in_its_process_is_its_own() -> None:
    before = os.getcwd(), random.getstate(), torch.random.get_rng_state(), torch.get_num_threads()
    run = Ranks().function(changes_everything, ranks=2)
    assert [result[:2] for result in run.results] == [("0", "0"), ("1", "1")]
    assert run.results[0][2] == run.results[1][2]
    assert "LEFT_BEHIND" not in os.environ
    assert before[0] == os.getcwd()
    assert before[1] == random.getstate()
    assert torch.equal(before[2], torch.random.get_rng_state())
    assert (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()) == (torch.float32, False)
    assert not dist.is_initialized()
    assert torch.get_num_threads() == before[3]


def leaves_an_operation():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1 << 20), async_op=True)


def leaves_a_file(kept):
    dist.init_process_group("gloo")
    dist.barrier()
    kept.append(open(os.devnull, "w"))  # noqa: SIM115


def test_what_is_left_behind_is_told() -> None:
    kept: list = []
    with pytest.raises(
        RanksFailed, match=r"leak: rank 0 has ended without waiting for all_reduce #0 .*py:\d+\), which is"
    ):
        Ranks().function(leaves_an_operation, ranks=2)
    with pytest.raises(RanksFailed, match="leak: rank 0 has left the file /dev/null open, which it writes"):
        Ranks().function(leaves_a_file, kept, ranks=2)
    for file in kept:
        file.close()


def changes_in_flight():
    dist.init_process_group("nccl")
    x = torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.isend(x, 1)
        x += 1
    else:
        work = dist.irecv(x, 0)
    work.wait()


def looks_in_flight():
    dist.init_process_group("nccl")
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    found = x.sum().item()
    work.wait()
    return found


def test_buffers_in_flight() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 changes a tensor at test_torch.py:\d+ \(add_\) while send #0 to"):
        Ranks().function(changes_in_flight, ranks=2)
    with pytest.raises(RanksFailed, match=r"rank 0 reads a tensor at test_torch.py:\d+ \(sum\) while all_reduce #0"):
        Ranks().function(looks_in_flight, ranks=2)


def draws():
    dist.init_process_group("gloo")
    first = torch.rand(1).item(), random.random(), float(np.random.rand())
    dist.barrier()
    return first, torch.rand(1).item()


def averaged(seed, groups):
    """A loop that averages gradients by hand, over all ranks or over halves of them."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed * dist.get_rank())
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])] if groups else [None]
    for _ in range(2):
        layer(torch.ones(3, 4)).sum().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=halves[dist.get_rank() // 2 % len(halves)])
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def test_weights_differ_though_all_ranks_add_up_every_gradient() -> None:
    run = Ranks().function(averaged, 1, False, ranks=4, check=False)
    assert [verdict.kind for verdict in run.verdicts] == ["weights differ"]
    assert run.verdicts[0].text.startswith("before the first update 'weight' differs: rank")
    assert not Ranks().function(averaged, 0, False, ranks=4).verdicts
    assert not Ranks().function(averaged, 1, True, ranks=4).verdicts  # halves may be meant to differ


def test_random_numbers_of_ranks_are_apart_as_in_processes() -> None:
    """PyTorch begins with the same state in each process, Python and numpy with others."""
    one, two = Ranks().function(draws, ranks=2).results
    assert (one[0][0], one[1]) == (two[0][0], two[1])
    assert one[0][1] != two[0][1]
    assert one[0][2] != two[0][2]


def recorded_training():
    """Record forward, backward and the optimizer of a rank without naming the rank."""
    dist.init_process_group("overlap")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    end = overlap.torch.record(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
    copy.deepcopy(model)  # as an average of models begins
    end()
    dist.destroy_process_group()


def test_record_knows_the_rank_of_its_thread() -> None:
    timeline = Ranks().function(recorded_training, ranks=2).timeline
    for rank in range(2):
        spans = [span for span in timeline.spans if span.rank == rank and span.step is not None and span.kind != "step"]
        parts = ["SGD", "all_reduce", "backward Linear", "forward Linear"]
        assert sorted((span.step, span.name) for span in spans) == [(step, part) for step in range(2) for part in parts]


def recording_without_a_group():
    overlap.torch.record(torch.nn.Linear(1, 1))


def test_record_needs_a_group_in_tests_too() -> None:
    with pytest.raises(RanksFailed, match="there is no world; call init_process_group"):
        Ranks().function(recording_without_a_group, ranks=2)


def waits_by_sleeping(path):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        path.touch()
    else:
        time.sleep(1)  # "until rank 0 has written it"
        assert path.exists(), "not yet"
    dist.barrier()


def waits_by_polling(path):
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        path.touch()
    while not path.exists():
        time.sleep(1)
    dist.barrier()


@pytest.mark.slow
def test_nothing_may_depend_on_how_long_a_sleep_lasts(tmp_path: Path) -> None:
    for seed in (0, 1):
        (tmp_path / "it").unlink(missing_ok=True)
        Ranks().function(waits_by_sleeping, tmp_path / "it", ranks=3, seed=seed)
    verdicts = []
    for seed in range(2, 20, 2):
        (tmp_path / "it").unlink(missing_ok=True)
        verdicts.append(Ranks().function(waits_by_sleeping, tmp_path / "it", ranks=3, seed=seed, check=False).verdict)
        (tmp_path / "it").unlink(missing_ok=True)
        assert not Ranks().function(waits_by_polling, tmp_path / "it", ranks=3, seed=seed).verdicts
    found = [verdict for verdict in verdicts if verdict is not None]
    assert found
    assert {verdict.kind for verdict in found} == {"crash"}
    assert "AssertionError: not yet" in found[0].text


def makes_groups():
    dist.init_process_group("gloo")
    ranks = [[0, 1], [1, 2]]
    groups = [dist.new_group(each) for each in (ranks[::-1] if dist.get_rank() == 1 else ranks)]
    dist.barrier()
    assert len(groups) == 2


def test_groups_that_are_made_in_another_order_are_told() -> None:
    verdict = Ranks().function(makes_groups, ranks=3, check=False).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("group order", (1, 0))
