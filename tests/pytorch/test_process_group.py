"""What torch's functions call, called directly: every method, every kind of tensor, errors in torch's types."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from typing_extensions import deprecated  # noqa: E402

from overlap import Connection  # noqa: E402
from overlap.processes.control import ControlPlane  # noqa: E402
from overlap.runtime.match import History, RankCall  # noqa: E402
from overlap.torch import ProcessGroup, Work  # noqa: E402
from overlap.torch.backend import _leave_world  # noqa: E402
from tests.errors import error_of  # noqa: E402

from .pairs import Ranks, connected, do, ranks  # noqa: E402


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def reduced(pair: Ranks, op: Any, *values: list[float], dtype: Any = torch.float32) -> list[list[float]]:
    def call(group: ProcessGroup) -> list[float]:
        x = torch.tensor(values[group.rank()], dtype=dtype)
        group.allreduce([x], options(dist.AllreduceOptions, reduceOp=op)).wait()
        return x.tolist()

    return pair.do(call)


OPS = {"SUM": [5, 7], "AVG": [2.5, 3.5], "PRODUCT": [4, 10], "MIN": [1, 2], "MAX": [4, 5]}


@pytest.mark.parametrize("name", OPS)
def test_reductions(pair: Ranks, name: str) -> None:
    assert reduced(pair, getattr(dist.ReduceOp, name), [1, 2], [4, 5]) == [OPS[name]] * 2


@pytest.mark.parametrize(("name", "expected"), [("BAND", [4, 1]), ("BOR", [7, 7]), ("BXOR", [3, 6])])
def test_reductions_of_bits(pair: Ranks, name: str, expected: list[int]) -> None:
    op = getattr(dist.ReduceOp, name)
    assert reduced(pair, op, [6, 3], [5, 5], dtype=torch.int32) == [expected] * 2


def _summed_in_every_form(group: ProcessGroup, x: Any, op: Any) -> list[Any]:
    """Return what each form of a reduction gives on rank 0, of a tensor with an element for each rank."""
    at = {name: x.clone() for name in ("all", "again", "several", "other", "coalesced", "small", "one")}
    part = {name: x[:1].clone() for name in ("list", "single", "pairs")}
    chosen = options(dist.AllreduceOptions, reduceOp=op)
    scattered = options(dist.ReduceScatterOptions, reduceOp=op)
    for name in ("all", "again"):  # the second one is prepared
        group.allreduce([at[name]], chosen).wait()
    group.allreduce([at["several"], at["other"]], chosen).wait()
    group.allreduce_coalesced(
        [at["coalesced"], at["small"]], options(dist.AllreduceCoalescedOptions, reduceOp=op)
    ).wait()
    group.reduce([at["one"]], options(dist.ReduceOptions, reduceOp=op)).wait()
    if group.rank():
        del at["one"]  # undefined there
    group.reduce_scatter([part["list"]], [[x[:1].clone(), x[1:].clone()]], scattered).wait()
    group.reduce_scatter_single(part["single"], x.clone(), scattered).wait()
    group.reduce_scatter_tensor_coalesced([part["pairs"]], [x.clone()], scattered).wait()
    return [{name: value.tolist() for name, value in values.items()} for values in (at, part)]


def test_a_sum_of_bool_is_a_logical_or(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[Any]:
        return _summed_in_every_form(group, torch.tensor([False, group.rank() == 0]), dist.ReduceOp.SUM)

    for rank, (whole, parts) in enumerate(pair.do(call)):
        assert len(whole) == 7 - rank
        assert all(value == [False, True] for value in whole.values())
        assert parts == {name: [rank == 1] for name in ("list", "single", "pairs")}


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_a_mean_of_integers_is_refused_at_the_call(pair: Ranks, dtype: str) -> None:
    x = torch.ones(2, dtype=getattr(torch, dtype))
    reduce_scatter = options(dist.ReduceScatterOptions, reduceOp=dist.ReduceOp.AVG)
    calls: list[Callable[[ProcessGroup], Work]] = [
        lambda group: group.allreduce([x], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)),
        lambda group: group.allreduce_coalesced(
            [x], options(dist.AllreduceCoalescedOptions, reduceOp=dist.ReduceOp.AVG)
        ),
        lambda group: group.reduce([x], options(dist.ReduceOptions, reduceOp=dist.ReduceOp.AVG)),
        lambda group: group.reduce_scatter([x[:1]], [[x[:1], x[1:]]], reduce_scatter),
        lambda group: group.reduce_scatter_single(x[:1], x, reduce_scatter),
        lambda group: group.reduce_scatter_tensor_coalesced([x[:1]], [x], reduce_scatter),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=f"^op: AVG of torch.{dtype} would not be exact, and gloo refuses it"):
            call(pair.groups[0])


def test_a_sum_of_multiples(pair: Ranks) -> None:
    assert reduced(pair, dist._make_nccl_premul_sum(2.0), [1, 2], [4, 5]) == [[10, 14]] * 2


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "int8", "int64", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_of_every_kind(pair: Ranks, name: str) -> None:
    assert reduced(pair, dist.ReduceOp.SUM, [1, 2], [3, 4], dtype=getattr(torch, name)) == [[4, 6]] * 2


def test_tensors_whose_elements_lie_apart(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[list[int]]:
        x = torch.arange(6).reshape(2, 3)
        group.allreduce([x.t()]).wait()
        column = torch.zeros(3, 2, dtype=torch.int64)
        group.all_gather_single(column[:2, 1], torch.tensor([7 + group.rank()])).wait()
        return [x.flatten().tolist(), column.flatten().tolist()]

    assert pair.do(call) == [[[0, 2, 4, 6, 8, 10], [0, 7, 0, 8, 0, 0]]] * 2


def test_a_gradient_that_is_being_tracked(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[float]:
        x = torch.ones(2, requires_grad=True)
        group.broadcast([x], options(dist.BroadcastOptions, rootRank=0)).wait()
        return x.tolist()

    assert pair.do(call) == [[1, 1]] * 2


def test_gathers_and_scatters(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[Any]:
        rank = group.rank()
        x, outs = torch.tensor([rank, 10 + rank]), [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        group.allgather([outs], [x]).wait()
        found = [[out.tolist() for out in outs]]
        one = torch.zeros(1, dtype=torch.int64)
        group.reduce_scatter([one], [[x[:1], x[1:]]]).wait()
        found.append(one.item())
        group.scatter([one], [[x[:1], x[1:]]] if rank == 1 else [], options(dist.ScatterOptions, rootRank=1)).wait()
        found.append(one.item())
        got = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        group.gather([got] if rank == 0 else [], [x], options(dist.GatherOptions, rootRank=0)).wait()
        return [*found, [out.tolist() for out in got]]

    both = [[0, 10], [1, 11]]
    assert pair.do(call) == [[both, 1, 1, both], [both, 21, 11, [[0, 0], [0, 0]]]]


@pytest.mark.parametrize("lie", ["one behind the other", "in another order", "apart", "around the input"])
def test_lists_of_tensors_in_one_piece_of_memory(pair: Ranks, lie: str) -> None:
    """Those that lie one behind the other, as of `chunk`, are written where they are."""

    def call(group: ProcessGroup) -> list[Any]:
        rank = group.rank()
        room = torch.zeros(9)
        parts = {"in another order": [room[3:6], room[:3]], "apart": [room[:3], room[4:7]]}.get(
            lie, [room[:3], room[3:6]]
        )
        x = torch.full((3,), rank + 1.0)
        if lie == "around the input":
            x = room[6:9].fill_(rank + 1.0)
        group.allgather([parts], [x]).wait()
        found = [[part.tolist() for part in parts], room.tolist()[:7]]
        for part in parts:
            part.zero_()
        group.gather([parts] if rank == 1 else [], [x], options(dist.GatherOptions, rootRank=1)).wait()
        found.append([part.tolist() for part in parts])
        group.scatter([x], [parts] if rank == 1 else [], options(dist.ScatterOptions, rootRank=1)).wait()
        return [*found, x.tolist()]

    one, two, none = [1.0] * 3, [2.0] * 3, [0.0] * 3
    whole = {"in another order": [*two, *one, 0.0], "apart": [*one, 0.0, *two]}
    for rank, found in enumerate(pair.do(call)):
        room = whole.get(lie, [*one, *two, rank + 1.0 if lie == "around the input" else 0.0])
        assert found == [[one, two], room, [one, two] if rank == 1 else [none, none], [one, two][rank]]


def test_nobody_asks_what_travels(pair: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who receives has a tensor that says it."""
    asked = list[object]()
    tell = ControlPlane.send_waiting_call

    def telling(saying: ControlPlane, of: History, seq: int, said: RankCall) -> None:
        if said.call.dtype is None:
            asked.append(said)
        tell(saying, of, seq, said)

    monkeypatch.setattr(ControlPlane, "send_waiting_call", telling)

    def run(group: ProcessGroup) -> list[list[float]]:
        one, x = torch.zeros(1), torch.tensor([5.0, 6.0])
        group.scatter(
            [one], [[x[:1], x[1:]]] if group.rank() == 1 else [], options(dist.ScatterOptions, rootRank=1)
        ).wait()
        many = x * (1 + group.rank())
        group.broadcast([many], options(dist.BroadcastOptions, rootRank=1)).wait()
        return [one.tolist(), many.tolist()]

    assert pair.do(run) == [[[5.0], [10.0, 12.0]], [[6.0], [10.0, 12.0]]]
    assert asked == []


def test_coalesced_operations_travel_as_one_unless_they_are_large(pair: Ranks) -> None:
    large = (1 << 15) + 1  # 128 KiB, and one element more

    def call(group: ProcessGroup) -> tuple[Any, ...]:
        rank, before = group.rank(), group._get_sequence_number_for_group()
        sums = [torch.full((2, 3), rank + 1.0).t(), torch.full((large,), rank + 1.0), torch.full((), rank + 1.0)]
        sums.append(torch.full((large - 1,), rank + 1.0))
        average = options(dist.AllreduceCoalescedOptions, reduceOp=dist.ReduceOp.AVG)
        group.allreduce_coalesced(sums, average).wait()
        joined = [torch.empty(4), torch.empty(2, dtype=torch.int8)]
        group.all_gather_single_coalesced(joined, [torch.full((2,), rank + 1.0), torch.full((1,), rank).char()]).wait()
        parts = [torch.empty(1, 2), torch.empty(1)]
        group.reduce_scatter_single_coalesced(parts, [torch.arange(4.0).view(2, 2), torch.ones(2)]).wait()
        issued = group._get_sequence_number_for_group() - before
        return issued, [(x.unique().tolist(), x.shape) for x in sums], joined[0].tolist(), joined[1].tolist(), parts

    for rank, (issued, sums, floats, numbers, parts) in enumerate(pair.do(call)):
        assert issued == 2 + 1 + 1
        assert sums == [([1.5], (3, 2)), ([1.5], (large,)), ([1.5], ()), ([1.5], (large - 1,))]
        assert (floats, numbers) == ([1, 1, 2, 2], [0, 1])
        assert [part.tolist() for part in parts] == [[[0, 2], [4, 6]][rank : rank + 1], [2]]


def test_gathers_of_tensors_that_differ_in_size(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[list[int]]:
        outs = [torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]
        group.allgather([outs], [torch.full((1 + 2 * group.rank(),), group.rank())]).wait()
        return [out.tolist() for out in outs]

    assert pair.do(call) == [[[0], [1, 1, 1]]] * 2


def test_all_to_all_of_parts_that_differ(pair: Ranks) -> None:
    splits = [[1, 2], [3, 0]]  # from rank i to rank j

    def call(group: ProcessGroup) -> list[int]:
        rank = group.rank()
        x = torch.arange(3) + 10 * rank
        out = torch.zeros(splits[0][rank] + splits[1][rank], dtype=torch.int64)
        group.all_to_all_single(out, x, [splits[0][rank], splits[1][rank]], splits[rank]).wait()
        return out.tolist()

    assert pair.do(call) == [[0, 10, 11, 12], [1, 2]]


def test_all_to_all_of_lists_and_of_even_parts(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[Any]:
        rank = group.rank()
        outs = [torch.zeros(1 + other, dtype=torch.int64) for other in range(2)]
        group.alltoall(outs, [torch.full((1 + rank,), 10 * rank + other) for other in range(2)]).wait()
        even = torch.tensor([rank, 5 + rank])
        group.all_to_all_single(even, even.clone(), [], []).wait()
        return [[out.tolist() for out in outs], even.tolist()]

    assert pair.do(call) == [[[[0], [10, 10]], [0, 1]], [[[1], [11, 11]], [5, 6]]]


def test_messages_from_anybody(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[int]:
        if group.rank() == 0:
            group.send([torch.tensor([5])], 1, 3).wait()
            return []
        x = torch.zeros(1, dtype=torch.int64)
        work = group.recv_anysource([x], 3)
        work.wait()
        return [x.item(), work.source_rank()]

    assert pair.do(call) == [[], [5, 0]]


def test_sums_of_sparse_tensors(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[float]:
        x = torch.tensor([1.0, 0, 1 - group.rank(), group.rank()]).to_sparse()
        group.allreduce([x]).wait()
        return x.to_dense().tolist()

    assert pair.do(call) == [[2, 0, 1, 1]] * 2


def test_what_is_chained_to_a_future_may_issue_and_wait(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> float:
        def again(future: Any) -> Any:
            x = future.value()[0]
            group.allreduce([x]).wait()
            return x

        return float(group.allreduce([torch.ones(1)]).get_future().then(again).wait())

    assert pair.do(call) == [4, 4]


def test_a_part_of_a_group(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> list[Any]:
        part = group.split_group([group.rank()], group_name=f"own {group.rank()}")
        assert part is not None
        x = torch.ones(1)
        part.allreduce([x]).wait()
        return [part.size(), part.group_name, x.item(), group.split_group([1 - group.rank()])]

    assert pair.do(call) == [[1, "own 0", 1, None], [1, "own 1", 1, None]]


def test_a_barrier_that_names_who_is_missing(pair: Ranks) -> None:
    def call(group: ProcessGroup) -> None:
        if group.rank() == 0:
            group.monitored_barrier(timedelta(seconds=0.05))

    told, _ = pair.do(call)
    assert (type(told), str(told)) == (
        dist.DistBackendError,
        "Rank 1 failed to pass monitoredBarrier in 50 ms; look at what it does, or raise timeout",
    )


def test_torchs_functions_for_gloo_alone_serve_our_groups_by_name() -> None:
    def call(group: ProcessGroup) -> Any:
        before = group.options._timeout
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=23), group)
        limits = [before, group.options._timeout, group._get_backend(torch.device("cpu")).options._timeout]
        group.set_timeout(before)
        dist.monitored_barrier(group)
        dist.monitored_barrier(group, timeout=20.0, wait_all_ranks=True)
        return [limit.total_seconds() for limit in limits]

    with ranks(2) as two:  # a test of late ranks leaves the counts of barriers of a shared group unequal
        assert two.do(call) == [[30, 23, 23]] * 2
    for refuses in (dist.monitored_barrier, partial(dist.distributed_c10d._set_pg_timeout, timedelta(seconds=1))):
        with pytest.raises(ValueError, match=r"^Default process group has not been initialized"):
            refuses()
    with pytest.warns(UserWarning, match="which does not belong to the given group"):
        dist.monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER)


def test_under_detail_ranks_that_disagree_know_it_at_the_call() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with ranks(2) as two:
            part = two.do(lambda group: group.split_group([0, 1]))
            asynchronous = options(dist.AllreduceOptions, asyncOp=True)
            called = two.do(lambda group: group.allreduce([torch.ones(1)], asynchronous).is_completed())
            told = do([partial(group.allreduce, [torch.ones(4 + group.rank())], asynchronous) for group in part])
            whole, other = two.groups
            told += do(
                [
                    partial(whole.allreduce, [torch.ones(4)]),
                    partial(other._allgather_base, torch.ones(10), torch.ones(5)),
                ]
            )
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    assert called == [True, True]
    for error in told:
        assert type(error) is dist.DistBackendError
        assert "float32 (4,)" in str(error)
        assert "float32 (5,)" in str(error)


# -- bad input ---------------------------------------------------------------------------------------------------------

MIXED = [torch.ones(1), torch.ones(1, device="meta")]
ELSEWHERE = (
    "tensor: it is on meta, and backend 'overlap' carries tensors of the CPU; pass .cpu(), or give that device a "
    "backend of its own, as in init_process_group('cpu:overlap,cuda:nccl')"
)
SPARSE = torch.eye(2).to_sparse()
REFUSED: dict[str, tuple[Callable[[ProcessGroup], Work], str]] = {
    "a tensor elsewhere": (lambda group: group.allreduce([torch.ones(1, device="meta")]), ELSEWHERE),
    "tensors of mixed devices": (
        lambda group: group.allreduce_coalesced(MIXED),
        "tensors: all tensors must be on one device, number 0 is on cpu and number 1 on meta; pass .cpu() of each",
    ),
    "tensors of mixed types": (
        lambda group: group.all_gather_single(torch.ones(2), torch.ones(1, dtype=torch.int8)),
        "output, input: all tensors must have one dtype, number 0 is torch.float32 and number 1 torch.int8; "
        "pass .to(torch.float32)",
    ),
    "a sparse tensor that is sent": (
        lambda group: group.send([SPARSE], 0, 0),
        "tensor: it is torch.sparse_coo, which only all_reduce(op=SUM) takes; pass .to_dense()",
    ),
    "the greatest of sparse tensors": (
        lambda group: group.allreduce([SPARSE], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)),
        "op: sparse tensors can be summed only, got 'max'; pass .to_dense()",
    ),
    "sparse rows": (
        lambda group: group.allreduce([torch.eye(2).to_sparse_csr()]),
        "tensor: it is torch.sparse_csr; backend 'overlap' sums sparse_coo tensors; pass .to_dense()",
    ),
    "several tensors": (
        lambda group: group.send([torch.ones(1)] * 2, 0, 0),
        "tensors: expected one tensor, for the one CPU of this rank, got 2",
    ),
    "too few outputs": (
        lambda group: group.allgather([[torch.ones(1)]], [torch.ones(1)]),
        "output_tensors: expected one for each of the 2 ranks, got 1",
    ),
    "outputs that are too small": (
        lambda group: group.allgather([[torch.ones(2), torch.ones(2)]], [torch.ones(3)]),
        "output_tensors: number 0 is for this rank's own tensor, which has 3 elements, and has 2; pass "
        "an output of its size",
    ),
    "splits that do not fit": (
        lambda group: group.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2]),
        "output_split_sizes: expected 2 sizes that are 3 rows together, got [1, 1]",
    ),
    "rows that cannot be shared": (
        lambda group: group.all_to_all_single(torch.ones(3), torch.ones(3), [], []),
        "output: axis 0 has 3 rows, which 2 ranks cannot share evenly; pass output_split_sizes",
    ),
    "a tag that is none": (lambda group: group.send([torch.ones(1)], 0, -1), "tag: expected 0 to 2147483647, got -1"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_at_the_call(pair: Ranks, what: str) -> None:
    call, text = REFUSED[what]
    assert str(error_of(ValueError, call, pair.groups[0])) == text


@contextmanager
def nothing_around() -> Iterator[None]:
    """Be a context in which nothing is different."""
    yield


@pytest.mark.filterwarnings("ignore:old")
@pytest.mark.parametrize("wrap", [deprecated("old"), nothing_around()], ids=["deprecated", "context"])
def test_a_rank_that_is_not_there_is_refused_with_the_line_of_the_call(pair: Ranks, wrap: Any) -> None:
    """Torch's functions may be wrapped in what is neither torch's nor the user's."""
    send = wrap(partial(pair.groups[0].send))
    with pytest.raises(ValueError, match=r"test_process_group.py:\d+\)$") as caught:
        send([torch.ones(1)], 7, 0)
    assert str(caught.value).startswith("dst: ")


def test_without_torch_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "overlap.torch")
    error = error_of(ImportError, importlib.import_module, "overlap.torch")
    expected = 'overlap.torch needs PyTorch 2.7 or later: pip install ".[torch]"'
    assert str(error) == expected


def test_ranks_that_disagree_are_both_named_in_python_and_in_cpp() -> None:
    def call(group: ProcessGroup) -> list[str]:
        work = group.allreduce([torch.ones(1 + group.rank())])
        texts = []
        for wait in (work.wait, work.get_future().wait):
            texts.append(str(error_of(RuntimeError, wait)))
        assert isinstance(work.exception(), dist.DistBackendError)
        return [*texts, str(work.is_success())]

    with ranks(2) as two:
        for python, cpp, well in two.do(call):
            assert "rank 0 called all_reduce(float32 (1,), op='sum')" in python
            assert "rank 1 called all_reduce(float32 (2,), op='sum')" in python
            assert python in cpp
            assert well == "False"


def test_a_wait_that_takes_too_long_says_so() -> None:
    def call(group: ProcessGroup) -> str:
        if group.rank() == 0:
            error = error_of(dist.DistBackendError, group.barrier().wait, timedelta(seconds=0.01))
            group._store.set("told", "yes")
            return str(error)
        group._store.wait(["told"])
        group.barrier().wait()
        return ""

    with ranks(2) as two:
        assert " Timed out after 0.01 s" in two.do(call)[0]


def test_a_group_whose_ranks_took_different_roots_says_so_when_it_ends() -> None:
    with connected(2, dist.HashStore()) as worlds:

        def gives(world: Connection) -> None:
            group = ProcessGroup(dist.HashStore(), world.rank.world, timedelta(seconds=30))
            group.broadcast([torch.ones(2)], root=world.rank.rank).wait()

        assert do([partial(gives, world) for world in worlds]) == [None, None]
        ended = do([partial(_leave_world, world) for world in worlds])
    assert [type(error) for error in ended] == [dist.DistBackendError] * 2
    assert all("root=0" in str(error) and "root=1" in str(error) for error in ended)
