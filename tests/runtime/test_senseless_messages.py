"""Messages between worlds, of every kind and with any value that its types allow: their sender is named, or they do."""

from __future__ import annotations

from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import overlap
from overlap.processes.control import ControlPlane
from overlap.processes.wire import Failed, MemberNotice, RankEvent, encode_body
from overlap.runtime.blame.views import find_stall
from overlap.runtime.forms import pack_form
from overlap.runtime.world import World

from .companies import Company, run_far

RANKS = 4
NUMBERS = st.integers(-2, 5) | st.integers(-(2**63), 2**63 - 1)
WORDS = st.sampled_from(["", "barrier", "all_reduce", "sum", "float32", "recv", "bfloat16", "x" * 600]) | st.text(
    max_size=9
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return all values of a type that a message may hold."""
    if hint is int:
        return NUMBERS
    if hint is str:
        return WORDS
    if hint is bytes:
        return st.binary(max_size=9) | WORDS.map(pack_form)
    if hint in (bool, type(None)):
        return st.from_type(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or hasattr(hint, "_fields")):
        return st.builds(hint, **{name: values(each) for name, each in get_type_hints(hint).items()})
    of, within = get_origin(hint), get_args(hint)
    if of is list:
        return st.lists(values(within[0]), max_size=4)
    if of is tuple and within[1:] == (...,):
        return st.lists(values(within[0]), max_size=4).map(tuple)
    if of is tuple:
        return st.tuples(*map(values, within))
    assert of is Union or str(hint).count("|"), hint
    return st.one_of(*map(values, within))


def events(kind: type[RankEvent], channels: list[int]) -> st.SearchStrategy[RankEvent]:
    hints = get_type_hints(kind)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    if "channel" in fields:
        fields["channel"] = st.sampled_from(channels) | NUMBERS
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", get_args(RankEvent), ids=lambda kind: kind.__name__)
def test_it_is_acted_upon_or_its_sender_is_named(kind: type[RankEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    planes, blamed = list[ControlPlane](), list[tuple[int, BaseException]]()
    attached = ControlPlane.attach

    def known(plane: ControlPlane, world: World) -> Any:
        planes.append(plane)
        return attached(plane, world)

    def blame(world: World, culprit: int, cause: BaseException, doing: list[str]) -> None:
        blamed.append((culprit, cause))

    def hear(here: ControlPlane, event: RankEvent) -> None:
        blamed.clear()
        here._handle(MemberNotice(1, encode_body(event)))
        find_stall(here.quiet(), RANKS)  # whatever it is told of
        for culprit, cause in blamed:
            if isinstance(event, Failed) and 0 <= event.culprit < RANKS:
                assert culprit == event.culprit
            else:
                assert culprit == 2  # the first rank of process 1
                assert str(cause).startswith("process 1 sent an invalid event: ")
        if isinstance(event, Failed):
            assert blamed

    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()  # so that there is a communicator to speak of
        begun.set()
        await over.wait()

    async def nemesis(everybody: list[Company]) -> None:
        await begun.wait()
        (here,) = [plane for plane in planes if plane._membership is everybody[0]]
        channels = list(here._communicators.spanning)
        assert channels
        given(events(kind, channels))(lambda event: hear(here, event))()
        over.set()

    begun, over = trio.Event(), trio.Event()
    monkeypatch.setattr(ControlPlane, "attach", known)
    monkeypatch.setattr(World, "fail_elsewhere", blame)
    monkeypatch.setattr(World, "stopped_elsewhere", lambda world, reason: None)
    run_far(main, 2, 2, nemesis=nemesis)
