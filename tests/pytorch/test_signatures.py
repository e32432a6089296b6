"""Calls of a process group in every form that c10d's have, the values of their futures, and the types of errors."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

from overlap.torch import ProcessGroup, Work  # noqa: E402
from tests.errors import error_of  # noqa: E402

from .pairs import Ranks  # noqa: E402
from .test_process_group import options  # noqa: E402


def value(work: Work) -> Any:
    """Return the value of the future, as C++ and functions chained to it see it."""
    return work.get_future().wait()


def numbers(found: Any) -> Any:
    return found.to_dense().tolist() if isinstance(found, torch.Tensor) else [numbers(each) for each in found]


def own(group: ProcessGroup, *offsets: int) -> Any:
    made = [torch.tensor([10 * group.rank() + offset]) for offset in offsets or (0,)]
    return made if offsets else made[0]


LIMIT = timedelta(seconds=20)
MAX = dist.ReduceOp.MAX
# By form of the call: the call, and the value of its future on both ranks.
FORMS: dict[str, tuple[Callable[[ProcessGroup], Work], list[Any]]] = {
    "broadcast(x)": (lambda g: g.broadcast(own(g)), [[[0]]] * 2),
    "broadcast([x])": (lambda g: g.broadcast([own(g)]), [[[0]]] * 2),
    "broadcast(x, 1)": (lambda g: g.broadcast(own(g), 1), [[[10]]] * 2),
    "broadcast(x, root=1)": (lambda g: g.broadcast(own(g), root=1), [[[10]]] * 2),
    "broadcast(tensor=x, root=1)": (lambda g: g.broadcast(tensor=own(g), root=1, timeout=LIMIT), [[[10]]] * 2),
    "broadcast of several": (
        lambda g: g.broadcast(own(g, 1, 2), options(dist.BroadcastOptions, rootRank=1, rootTensor=1)),
        [[[12], [12]]] * 2,
    ),
    "allreduce(x)": (lambda g: g.allreduce(own(g)), [[[10]]] * 2),
    "allreduce(x, MAX)": (lambda g: g.allreduce(own(g), MAX), [[[10]]] * 2),
    "allreduce([x], op=)": (lambda g: g.allreduce([own(g, 3)[0]], op=MAX), [[[13]]] * 2),
    "allreduce of several": (lambda g: g.allreduce(own(g, 1, 2, 3)), [[[42], [42], [42]]] * 2),
    "allreduce of several, MAX": (lambda g: g.allreduce(own(g, 1, 3), op=MAX), [[[13], [13]]] * 2),
    "allreduce of several sparse": (
        lambda g: g.allreduce([each.to_sparse() for each in own(g, 1, 2)]),
        [[[26], [26]]] * 2,
    ),
    "allreduce_coalesced": (lambda g: g.allreduce_coalesced(own(g, 1, 2)), [[[12], [14]]] * 2),
    "reduce(x, 1, MAX)": (lambda g: g.reduce(own(g), 1, MAX), [[[0]], [[10]]]),
    "reduce(tensor=, root=, op=)": (lambda g: g.reduce(tensor=own(g), root=1, op=MAX), [[[0]], [[10]]]),
    "reduce([x])": (lambda g: g.reduce([own(g, 1)[0]], root=0), [[[12]], [[11]]]),
    "allgather": (lambda g: g.allgather([own(g, 5, 5)], [own(g)]), [[[0], [10]]] * 2),
    "allgather(outs, x)": (lambda g: g.allgather(own(g, 5, 5), own(g), LIMIT), [[[0], [10]]] * 2),
    "allgather of several": (
        lambda g: g.allgather([own(g, 5, 5, 5, 5), own(g, 5, 5, 5, 5)], own(g, 1, 2)),
        [[[[1], [2], [11], [12]]] * 2] * 2,
    ),
    "allgather_coalesced": (
        lambda g: g.allgather_coalesced([own(g, 5, 5), own(g, 5, 5)], own(g, 1, 2)),
        [[[[1], [2]], [[11], [12]]]] * 2,
    ),
    "gather": (lambda g: g.gather([own(g, 5, 5)] if g.rank() == 0 else [], [own(g)]), [[[0], [10]], []]),
    "gather(outs, x, 1)": (lambda g: g.gather(own(g, 5, 5) if g.rank() == 1 else [], own(g), 1), [[], [[0], [10]]]),
    "scatter(out, ins, root=1)": (
        lambda g: g.scatter(own(g), own(g, 1, 2) if g.rank() == 1 else [], root=1),
        [[[11]], [[12]]],
    ),
    "reduce_scatter(out, ins, MAX)": (lambda g: g.reduce_scatter(own(g), own(g, 1, 2), MAX), [[[11]], [[12]]]),
    "reduce_scatter(output=, input=)": (
        lambda g: g.reduce_scatter(output=own(g), input=own(g, 1, 2), op=MAX),
        [[[11]], [[12]]],
    ),
    "barrier(timeout)": (lambda g: g.barrier(LIMIT), [[], []]),
}  # fmt: skip


@pytest.mark.everyday(30)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_a_call(pair: Ranks, form: str) -> None:
    call, expected = FORMS[form]

    def run(group: ProcessGroup) -> Any:
        return numbers(value(call(group)))

    assert pair.do(run) == expected


def test_messages_by_the_names_of_c10d(pair: Ranks) -> None:
    def run(group: ProcessGroup) -> Any:
        if group.rank() == 0:
            return numbers(value(group.send([own(group, 4)[0]], dstRank=1, tag=2)))
        return numbers(value(group.recv([own(group, 5)[0]], srcRank=0, tag=2)))

    assert pair.do(run) == [[[4]], [[4]]]


LONG, SHORT, WIDE = torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.float64)
SPARSE = torch.eye(2).to_sparse()
# What c10d raises a RuntimeError for, and our sentence.
REFUSED: dict[str, tuple[Callable[[ProcessGroup], Work], str]] = {
    "no tensor": (lambda g: g.allreduce([]), "tensors: expected at least one tensor, got an empty list"),
    "other dtypes": (
        lambda g: g.allreduce([LONG, WIDE]),
        "tensors: all tensors must have one dtype, number 0 is torch.float32 and number 1 torch.float64",
    ),
    "other sizes": (
        lambda g: g.broadcast([LONG, SHORT]),
        "tensors: all tensors must have one shape, number 0 is (1,) and number 1 (2,)",
    ),
    "other layouts": (
        lambda g: g.allreduce([torch.zeros(2, 2), SPARSE]),
        "tensors: all tensors must have one layout, number 0 is torch.strided and number 1 torch.sparse_coo",
    ),
    "a root that is not there": (
        lambda g: g.broadcast(LONG, root=2),
        "root: expected 0 to 1, a rank of group 'world', got 2 (called at test_signatures.py:",
    ),
    "a root tensor that is not there": (
        lambda g: g.broadcast([LONG], options(dist.BroadcastOptions, rootTensor=1)),
        "rootTensor: expected 0 to 0, got 1",
    ),
    "sparse tensors that are coalesced": (
        lambda g: g.allreduce_coalesced([SPARSE, SPARSE]),
        "tensor: it is torch.sparse_coo, which only all_reduce(op=SUM) takes; pass .to_dense()",
    ),
    "several tensors to reduce": (
        lambda g: g.reduce([LONG, LONG], 0),
        "tensors: expected one tensor, for the one CPU of this rank, got 2",
    ),
    "coalesced outputs of another size": (
        lambda g: g.allgather_coalesced([[LONG, LONG], [LONG, SHORT]], [LONG, LONG]),
        "output_lists: expected 1 elements in tensor 1 of number 1, as in the input, got 2",
    ),
    "coalesced outputs that are missing": (
        lambda g: g.allgather_coalesced([[LONG], [LONG]], [LONG, LONG]),
        "output_lists[0]: expected 2 tensors, one for each input, got 1",
    ),
    "joined outputs of another size": (
        lambda g: g.all_gather_single_coalesced([SHORT, SHORT], [LONG, SHORT]),
        "outputs: number 1 must have 2 x 2 elements, has 2",
    ),
    "inputs to scatter of another size": (
        lambda g: g.reduce_scatter_single_coalesced([LONG, SHORT], [SHORT, SHORT]),
        "inputs: number 1 must have 2 x 2 elements, has 2",
    ),
    "outputs of another number": (
        lambda g: g.allgather([[LONG] * 4], [LONG] * 2),
        "output_tensors: expected one list for each of 2 input tensors, got 1",
    ),
}


@pytest.mark.everyday(30)
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.parametrize("what", REFUSED)
def test_what_c10d_refuses_is_refused_before_anything_starts(pair: Ranks, what: str, kind: type[Exception]) -> None:
    call, text = REFUSED[what]
    before = pair.groups[0]._get_sequence_number_for_group()
    assert str(error_of(kind, call, pair.groups[0])).startswith(text)
    assert pair.groups[0]._get_sequence_number_for_group() == before


@pytest.mark.parametrize("bad", [3, "x", None, [1], [[LONG]]])
def test_what_is_no_tensor_is_a_type_error(pair: Ranks, bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^tensors: expected a tensor or a list of tensors, got "):
        pair.groups[0].allreduce(bad)
