import asyncio
import inspect
import re

import numpy as np
import pytest
import trio

import overlap
from overlap import RankFailedError, UsageError, parallel


def notes_of(main):
    with pytest.raises(RankFailedError) as caught:
        overlap.run(main, ranks=1)
    return getattr(caught.value.__cause__, "__notes__", [])


@pytest.mark.parametrize(
    ("name", "meant"),
    [("size", "world_size"), ("get_rank", "rank"), ("allreduce", "all_reduce"), ("reduce_scater", "reduce_scatter")],
)
def test_a_misspelt_attribute_of_a_rank_is_told_with_the_right_one(name, meant):
    async def main(rank):
        getattr(rank, name)

    assert notes_of(main) == [f"did you mean {meant}?"]


@pytest.mark.parametrize("name", ["_private", "nothing_like_it_at_all"])
def test_other_attributes_have_no_hint(name):
    async def main(rank):
        getattr(rank, name)

    assert notes_of(main) == []


def test_an_attribute_that_a_future_lacks_on_purpose_has_no_hint():
    """Its message says what to do; its name is right."""

    async def main(rank):
        rank.all_reduce(np.ones(3)).shape  # noqa: B018

    assert notes_of(main) == []


@pytest.mark.parametrize(("argument", "hint"), [("operation", "did you mean op=?"), ("async_op", "no async_op")])
def test_a_misspelt_argument_of_a_call_is_told_with_the_right_one(argument, hint):
    async def main(rank):
        await rank.all_reduce(np.ones(3), **{argument: "max"})

    (note,) = notes_of(main)
    assert note.endswith(hint)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: rank.send(),
        lambda rank: rank.world.all_reduce(),
        lambda rank: rank.broadcast_object(of=1),
        lambda rank: rank.gather(),
        lambda rank: parallel.DataParallel(rank, {"w": np.ones(2)}, optimizer=parallel.SGD(0.1)).reduce(),
        lambda rank: parallel.DataParallel(rank, {"w": np.ones(2)}, optimizer=parallel.SGD(0.1)).step(1),
    ],
)
def test_an_error_of_a_call_names_no_class_that_users_do_not_know(call):
    async def main(rank):
        with pytest.raises(TypeError) as caught:
            call(rank)
        return str(caught.value)

    assert re.match(r"(send|all_reduce|broadcast_object|gather|reduce|step)\(\) ", overlap.run(main, ranks=1)[0])


def test_errors_of_others_have_no_hint():
    async def main(rank):
        np.ones(3, shap=2)

    assert notes_of(main) == []


def test_sleeping_as_asyncio_does_is_told_with_trio():
    async def main(rank):
        await asyncio.sleep(1)

    (note,) = notes_of(main)
    assert "trio.sleep" in note


@pytest.mark.parametrize("call", [overlap.run, overlap.connect])
def test_a_misspelt_argument_at_the_door_is_told_with_the_right_one(call):
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) .* 'time_out'; did you mean timeout_s="):
        call(lambda rank: None, time_out=2)


def test_arguments_of_other_libraries_are_known():
    with pytest.raises(TypeError, match="did you mean ranks="):
        overlap.run(lambda rank: None, num_ranks=2)


def test_doors_keep_their_signatures():
    assert "timeout_s" in inspect.signature(overlap.run).parameters
    assert "store" in inspect.signature(overlap.connect).parameters
    assert overlap.run.__doc__


def test_a_program_of_asyncio_is_told_its_doors():
    async def main(rank):
        return rank.rank

    with pytest.raises(UsageError, match=r"no Trio program runs here; use overlap\.run, or"):
        asyncio.run(overlap.run_async(main, ranks=1))
    assert trio.run(overlap.run_async, main) == [0, 1]


def test_a_name_of_another_room_is_told() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'overlap' .* 'Sharded'; did you mean overlap\.parallel\.Sharded\?$"
    ):
        _ = overlap.Sharded
    with pytest.raises(AttributeError, match=r"'Rangs'$"):
        _ = overlap.Rangs
