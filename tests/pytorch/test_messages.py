"""Messages of torch, which meet those of ranks, and what keeps one from coming."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

import torch.distributed as dist  # noqa: E402

from overlap import Connection, RankFailedError, RemoteError, connect  # noqa: E402
from overlap.runtime.interrupts import deferring_interrupts  # noqa: E402
from overlap.runtime.settling import wait_until_settled  # noqa: E402
from overlap.torch import ProcessGroup, private  # noqa: E402
from overlap.torch.errors import CallError  # noqa: E402
from tests.errors import error_of  # noqa: E402
from tests.interrupting import Tracer, interrupt_wait, sample  # noqa: E402
from tests.threads import running  # noqa: E402
from transports.shared_memory.engine import Engine  # noqa: E402
from transports.shared_memory.memory_link import MemoryRequest  # noqa: E402

from .pairs import connected, do  # noqa: E402

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128",
    "bfloat16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
LONG = 4 << 20  # bytes: more than a ring takes
_LIMIT = timedelta(seconds=30)


@pytest.fixture
def worlds() -> Iterator[list[Connection]]:
    with connected(2, dist.HashStore()) as both:
        yield both


@pytest.fixture
def groups(worlds: list[Connection]) -> list[ProcessGroup]:
    return [on(world) for world in worlds]


def on(world: Connection, limit: timedelta = _LIMIT) -> ProcessGroup:
    return ProcessGroup(dist.HashStore(), world.rank.world, limit)


def long(value: float) -> Any:
    return torch.full((LONG // 4,), value)


def test_a_message_is_in_the_timeline_of_both_ends(worlds: list[Connection], groups: list[ProcessGroup]) -> None:
    x = torch.zeros(5)
    work = groups[1].recv([x], 0, 3)
    groups[0].send([torch.arange(5.0)], 1, 3).wait()
    assert work.wait()
    assert x.tolist() == [0, 1, 2, 3, 4]
    for world, name in zip(worlds, ["send", "recv"], strict=True):
        (span,) = [each for each in world.rank.recorder.spans() if each.name == name]
        told = span.info
        assert (told.op, told.nbytes, told.dtype, told.seq, told.ranks) == ("send/recv", 20, "float32", 0, (0, 1))
        assert "test_messages.py:" in told.call_site


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (torch.arange(6.0).reshape(2, 3).T, torch.zeros(3, 2)),
        (torch.arange(6.0).reshape(3, 2), torch.zeros(2, 3).T),
        (torch.arange(6.0).reshape(3, 2).bfloat16(), torch.zeros(3, 2).bfloat16()),
        (torch.tensor([[True], [False]]), torch.zeros(2, 1, dtype=torch.bool)),
        (torch.zeros(0, 4), torch.ones(0, 4)),
        (torch.tensor(3 + 4j).conj(), torch.tensor(0j)),
        (torch.nn.Parameter(torch.ones(3)), torch.zeros(3)),
    ],
    ids=["transposed", "into a transposed one", "bfloat16", "bool", "empty", "conjugate", "parameter"],
)
def test_any_tensor_arrives(groups: list[ProcessGroup], sent: Any, taken: Any) -> None:
    work = groups[1].recv([taken], 0, 0)
    groups[0].send([sent], 1, 0).wait()
    work.wait()
    assert torch.equal(taken, sent.detach().reshape(taken.shape).resolve_conj())


def test_a_receive_of_something_else_names_both_lines(groups: list[ProcessGroup]) -> None:
    groups[0].send([torch.ones(4)], 1, 0).wait()
    assert re.fullmatch(
        r"operation #0 on group 'world' differs between ranks: rank 0 called send/recv\(float32 \(4,\)\) at "
        r"\S*:\d+, rank 1 called send/recv\(float32 \(5,\)\) at \S*:\d+; a message is received "
        r"with the shape and dtype with which it was sent",
        str(error_of(dist.DistBackendError, groups[1].recv([torch.zeros(5)], 0, 0).wait)),
    )


def test_a_mismatch_counts_the_elements_of_every_dtype(groups: list[ProcessGroup]) -> None:
    for tag, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        groups[0].send([torch.empty(12, dtype=dtype)], 1, tag).wait()
        error = error_of(dist.DistBackendError, groups[1].recv([torch.empty(13, dtype=dtype)], 0, tag).wait)
        assert re.findall(r"send/recv\((.*?)\)\)", str(error)) == [f"{name} (12,", f"{name} (13,"]


_NONSENSE = r"process 0 \(rank 0\) is lost: it wrote invalid data into shared memory"


@contextmanager
def connected_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Connection], list[Any]]]:
    """Connect two worlds; yield them, and for each process the memory between it and the other."""
    ways_by_process = []

    def make(bells: Any, ways: Any, look_s: float, *more: Any) -> Engine:
        ways_by_process.append(ways)
        return Engine(bells, ways, look_s, *more)

    monkeypatch.setattr("transports.shared_memory.engine.Engine", make)
    with connected(2, dist.HashStore()) as worlds:
        yield worlds, ways_by_process


def write_nonsense(ways_by_process: list[Any]) -> None:
    ((to_peer, from_peer, *_),) = [ways[1] for ways in ways_by_process if ways[1] is not None]
    to_peer[0:8] = from_peer[64:72] = (63).to_bytes(8, "little")  # the counts that process 0 writes


def test_a_peer_that_writes_nonsense_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected_engines(monkeypatch) as (worlds, ways_by_process):
        groups = [on(world) for world in worlds]
        received = groups[1].recv([torch.zeros(1)], 0, 0)
        write_nonsense(ways_by_process)
        for call in (received.wait, lambda: groups[1].send([torch.ones(1)], 0, 0).wait()):
            with pytest.raises(dist.DistBackendError, match=rf"(recv|send) #0 .*:\d+\): {_NONSENSE}|{_NONSENSE}"):
                call()


def test_a_receive_that_nothing_comes_to_fails_in_time(worlds: list[Connection]) -> None:
    group = on(worlds[1], timedelta(seconds=0.2))
    told = r"Timed out after 0.2 s: recv #0 from rank 0 .*:\d+.*waits for rank 0"
    with pytest.raises(dist.DistBackendError, match=told):
        group.recv([torch.zeros(1)], 0, 0).wait()
    x = torch.zeros(1)
    on(worlds[0]).send([torch.ones(1)], 1, 0).wait()
    assert group.recv([x], 0, 0).wait()  # the one before does not take it
    assert x.item() == 1


def test_a_wait_with_a_limit_leaves_the_operation_as_it_is(groups: list[ProcessGroup]) -> None:
    x = torch.zeros(1)
    work = groups[1].recv([x], 0, 0)
    with pytest.raises(dist.DistBackendError, match=r"Timed out after 0\.1 s"):
        work.wait(timedelta(seconds=0.1))
    assert not work.is_completed()
    groups[0].send([torch.ones(1)], 1, 0).wait()
    assert work.wait()
    assert x.item() == 1


@pytest.mark.parametrize("peer", [0, None], ids=["named", "any"])
def test_a_rank_that_leaves_fails_who_waits_for_it(peer: int | None) -> None:
    with connected(2, dist.HashStore()) as (gone, waits):
        group = on(waits)
        x = torch.zeros(1)
        work = group.recv([x], peer, 0) if peer is not None else group.recv_anysource([x], 0)
        with running(threading.Thread(target=gone.close)):
            told = "rank 0 finished its program" if peer is not None else "all other ranks finished their programs"
            with pytest.raises(dist.DistBackendError, match=told):
                work.wait()
            waits.close()


def test_what_was_sent_before_leaving_still_comes() -> None:
    with connected(2, dist.HashStore()) as (gone, waits):
        sent = [on(gone).send([long(3.0)], 1, tag) for tag in range(2)]
        with running(threading.Thread(target=gone.close)):
            for tag in range(2):
                x = long(0.0)
                assert on(waits).recv([x], 0, tag).wait()
                assert x.eq(3).all()
            waits.close()
        assert all(work.is_success() for work in sent)


def test_a_world_that_fails_fails_who_waits_and_names_the_culprit() -> None:
    with connected(2, dist.HashStore()) as (culprit, waits):
        work = on(waits).recv([torch.zeros(1)], 0, 0)
        with running(threading.Thread(target=culprit.fail, args=[RemoteError("ValueError", "no such file")])):
            with pytest.raises(dist.DistBackendError, match="rank 0 failed: ValueError: no such file"):
                work.wait()
            with pytest.raises(dist.DistBackendError, match="rank 0 failed"):
                on(waits).send([torch.zeros(1)], 0, 0)
        waits.fail(ValueError("it too"))


def test_asking_for_the_end_of_a_message_finds_that_the_world_has_failed() -> None:
    with connected(2, dist.HashStore()) as (culprit, asks):
        work = on(asks).recv([torch.zeros(1)], 0, 0)
        assert not work.is_completed()
        culprit.fail(RemoteError("ValueError", "no such file"))
        assert wait_until_settled(asks._ended, 30)
        assert (work.is_completed(), work.is_success()) == (True, False)
        assert "rank 0 failed: ValueError: no such file" in str(work.exception())


def test_an_interrupt_ends_a_wait_at_once_and_the_message_still_arrives(groups: list[ProcessGroup]) -> None:
    x, caught = torch.zeros(1), threading.Event()
    work = groups[1].recv([x], 0, 0)
    interrupting = threading.Thread(target=interrupt_wait, args=[threading.get_ident(), caught])
    with deferring_interrupts():
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        caught.set()
        interrupting.join()
        groups[0].send([torch.ones(1)], 1, 0).wait()
        assert work.wait()
    assert x.tolist() == [1]


def test_asking_for_the_end_of_a_message_finds_that_its_time_is_over(worlds: list[Connection]) -> None:
    work = on(worlds[1], timedelta(microseconds=1)).recv([torch.zeros(1)], 0, 0)
    while not work.is_completed():
        sleep(1e-3)
    assert "Timed out after 1e-06 s: recv #0 from rank 0" in str(work.exception())


def test_a_world_that_has_ended_takes_no_message() -> None:
    with connected(2, dist.HashStore()) as worlds:
        groups = [on(world) for world in worlds]
    with pytest.raises(dist.DistBackendError, match="the world has ended"):
        groups[0].send([torch.ones(1)], 1, 0)
    with pytest.raises(dist.DistBackendError, match="the world has ended"):
        groups[1].recv([torch.ones(1)], 0, 0)


def test_a_rank_that_closes_waits_for_its_receivers_no_longer_than_the_limit_of_its_messages() -> None:
    with connected(2, dist.HashStore()) as (sender, receiver):
        on(sender, timedelta(seconds=0.2)).send([long(1.0)], 1, 0)
        late = r"DeadlineError: send #0 to rank 1 on group 'world' \(\S*:\d+\) has not ended within timeout_s=0.2"
        with pytest.raises(RankFailedError, match=late):
            sender.close()
        receiver.failure(30)


def test_ranks_that_close_with_messages_to_each_other_wait_for_no_receive() -> None:
    with connected(2, dist.HashStore()) as worlds:
        for rank, world in enumerate(worlds):
            on(world).send([long(1.0)], 1 - rank, 0)
        assert do([world.close for world in worlds]) == [None, None]


def test_a_send_of_a_rank_that_closes_ends_well_when_its_receiver_leaves(
    worlds: list[Connection], groups: list[ProcessGroup]
) -> None:
    """The other rank may close and leave before this one, which closes too, looks again."""
    work = groups[0].send([long(1.0)], 1, 0)
    shared = worlds[0]._world.communicators

    def leave() -> None:
        shared.closing_ranks.add(0)
        shared.on_rank_left(1)

    worlds[0]._run_in_loop(leave)
    assert work.wait()


def repeat(groups: list[ProcessGroup], send: Any, receive: Any, *, receives_first: bool) -> None:
    """Send some times at one line and receive at another, of which the later ones are known there."""

    def sends() -> None:
        for _ in range(4):
            if receives_first:
                sleep(0.02)
            send(groups[0])

    def receives() -> None:
        for _ in range(4):
            if not receives_first:
                sleep(0.02)
            receive(groups[1])

    assert do([sends, receives]) == [None, None]


@pytest.mark.parametrize("receives_first", [False, True])
def test_a_parameter_arrives_again_and_again(groups: list[ProcessGroup], receives_first: bool) -> None:
    weights, copy = (torch.nn.Parameter(torch.full((300_000,), value)) for value in (3.0, 0.0))
    repeat(
        groups,
        lambda group: group.send([weights], 1, 0).wait(),
        lambda group: group.recv([copy], 0, 0).wait(),
        receives_first=receives_first,
    )
    assert (copy == 3).all()
    assert len(groups[0]._group._messages._known_messages) == len(groups[1]._group._messages._known_messages) == 1


def test_a_receive_from_any_source_stays_one(groups: list[ProcessGroup]) -> None:
    x, sources = torch.zeros(2), []

    def receive(group: ProcessGroup) -> None:
        work = group.recv_anysource([x], 0)
        work.wait()
        sources.append(work.source_rank())

    repeat(groups, lambda group: group.send([torch.ones(2)], 1, 0).wait(), receive, receives_first=False)
    assert sources == [0] * 4
    assert not groups[1]._group._messages._known_messages


def test_both_ends_of_known_messages_are_recorded_in_one_lane(groups: list[ProcessGroup]) -> None:
    x = torch.zeros(2)
    repeat(
        groups,
        lambda group: group.send([torch.ones(2)], 1, 0).wait(),
        lambda group: group.recv([x], 0, 0).wait(),
        receives_first=False,
    )
    (sent,), (received,) = (group._group._messages._known_messages.values() for group in groups)
    assert sent.flight_fields()["key"] == received.flight_fields()["key"]


def receive_while(
    meanwhile: Callable[[], object], groups: Sequence[ProcessGroup], out: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Let rank 1 receive as torch's `recv` does, the call being known; `meanwhile` runs once while it polls."""
    look = MemoryRequest.look

    def begin() -> Any:  # as torch's `irecv`, which `recv` calls
        return groups[1].recv([out], 0, 0)

    def receive() -> Any:
        return begin()

    def look_meanwhile(request: MemoryRequest) -> bool:
        monkeypatch.undo()
        do([meanwhile])
        return look(request)

    for value in (1.0, 2.0, 3.0):
        groups[0].send([torch.full((2,), value)], 1, 0)
        receive().wait()
    monkeypatch.setattr(private, "WAITING_CALLS", {receive.__code__})
    monkeypatch.setattr(MemoryRequest, "look", look_meanwhile)
    work = receive()
    assert MemoryRequest.look is look
    return work


def test_a_known_receive_whose_message_comes_while_it_polls_needs_no_future(
    groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    came = torch.zeros(2)
    work = receive_while(lambda: groups[0].send([torch.full((2,), 4.0)], 1, 0), groups, came, monkeypatch)
    assert work is private.finished_work
    assert came.tolist() == [4.0, 4.0]


def test_a_known_receive_that_meets_something_else_while_it_polls_fails_as_others_do(
    groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = receive_while(lambda: groups[0].send([torch.ones(5)], 1, 0), groups, torch.zeros(2), monkeypatch)
    with pytest.raises(dist.DistBackendError, match=r"operation #3 .* differs between ranks: .*\(5,\)\).*\(2,\)\)"):
        work.wait()


def test_a_peer_that_writes_nonsense_while_a_known_receive_polls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected_engines(monkeypatch) as (worlds, ways_by_process):
        groups = [on(world) for world in worlds]
        work = receive_while(lambda: write_nonsense(ways_by_process), groups, torch.zeros(2), monkeypatch)
        with pytest.raises(dist.DistBackendError, match=rf"recv #3 .*:\d+\): {_NONSENSE}"):
            work.wait()


@pytest.mark.parametrize("kind", ["recv", "send"])
def test_known_messages_with_a_peer_that_has_written_nonsense_name_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(2)

    def begin(group: ProcessGroup, peer: int, *, sends: bool) -> Any:
        return group.send([x], peer, 0) if sends else group.recv([x], peer, 0)

    with connected_engines(monkeypatch) as (worlds, ways_by_process):
        groups = [on(world) for world in worlds]
        for _ in range(3):
            do([begin(group, 1 - i, sends=(kind == "send") == bool(i)).wait for i, group in enumerate(groups)])
        write_nonsense(ways_by_process)
        for _ in range(3):
            with pytest.raises(dist.DistBackendError, match=_NONSENSE):
                begin(groups[1], 0, sends=kind == "send").wait()


def test_a_freed_tensor_is_refused_where_a_message_like_it_is_known(groups: list[ProcessGroup]) -> None:
    x = torch.ones(2)

    def send(group: ProcessGroup) -> None:
        group.send([x], 1, 0).wait()

    out = torch.zeros(2)
    repeat(groups, send, lambda group: group.recv([out], 0, 0).wait(), receives_first=False)
    x.untyped_storage().resize_(0)
    assert "its storage was freed" in str(error_of(CallError, send, groups[0]))


def talk(tracer: Tracer) -> type[BaseException] | None:
    """Send numbers there and back, the same call four times; the tracer looks at rank 0, in this thread."""

    def echo() -> None:
        x = torch.zeros(2)
        for _ in range(4):
            other.recv([x], 0, 0).wait()
            other.send([x], 0, 0).wait()

    def ask() -> None:
        for number in range(4):
            x, came = torch.full((2,), float(number)), torch.zeros(2)
            group.send([x], 1, 0).wait()
            group.recv([came], 1, 0).wait()
            assert (came == number).all()

    worlds = do([partial(connect, rank, 2, store=store) for store in [dist.HashStore()] for rank in range(2)])
    group, other = map(on, worlds)
    with ThreadPoolExecutor(1) as pool:
        echoing = pool.submit(echo)
        ended_by = tracer.run(ask)
        if ended_by is not None:
            worlds[0].fail(KeyboardInterrupt())
        failure = echoing.exception(30)
        # it ends well if the interrupt comes after it has sent its last answer
        assert failure is None or (ended_by is not None and isinstance(failure, dist.DistBackendError))
        if ended_by is not None:
            worlds[1].failure(30)
    do([world.close for world in worlds])
    return ended_by


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_an_interrupt_at_some_lines_ends_the_world(count: int) -> None:
    first = Tracer()
    assert talk(first) is None
    for line, turn in sample(first.passed, min(count, len(first.passed)), 5):
        tracer = Tracer(line, turn)
        assert talk(tracer) is (KeyboardInterrupt if tracer.interrupted else None), line


def test_an_aborted_group_fails_who_waits(worlds: list[Connection], groups: list[ProcessGroup]) -> None:
    work = groups[1].recv([torch.zeros(1)], 0, 0)
    worlds[0].rank.world.abort("enough")
    with pytest.raises(dist.DistBackendError, match="group 'world' was aborted by rank 0: enough"):
        work.wait()


def test_a_long_wait_is_an_operation_of_the_rank_until_it_ends(
    worlds: list[Connection], groups: list[ProcessGroup]
) -> None:
    context = worlds[1].rank.world._context
    x = torch.zeros(1)
    work = groups[1].recv([x], 0, 0)
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    while not context.outstanding.operations:
        waiting.join(0.01)
    (line,) = context.outstanding.operation_lines(context.now_ns())
    assert re.fullmatch(r"recv #0 from rank 0 on group 'world' \(\S*:\d+\); waits for rank 0", line)
    groups[0].send([torch.ones(1)], 1, 0).wait()
    waiting.join()
    assert groups[1].allreduce([x]) is not None
    groups[0].allreduce([torch.ones(1)]).wait()
    while context.outstanding.operations:
        waiting.join(0.01)


def test_a_long_send_ends_while_its_receiver_waits_for_something_else(groups: list[ProcessGroup]) -> None:
    """As with gloo, whose threads receive meanwhile."""
    out, total = long(0.0), torch.ones(1)

    def sends() -> None:
        groups[0].send([long(5.0)], 1, 0).wait()
        groups[0].allreduce([torch.ones(1)]).wait()

    def receives() -> None:
        work = groups[1].recv([out], 0, 0)
        groups[1].allreduce([total]).wait()
        assert work.is_completed()

    assert do([sends, receives]) == [None, None]
    assert out.eq(5).all()
    assert total.item() == 2


def test_both_may_send_first(groups: list[ProcessGroup]) -> None:
    def swap(group: ProcessGroup) -> float:
        out, other = long(-1.0), 1 - group.rank()
        work = group.recv([out], other, 0)
        group.send([long(float(group.rank()))], other, 0).wait()
        work.wait()
        return float(out.sum()) / out.numel()

    assert do([partial(swap, group) for group in groups]) == [1.0, 0.0]


@pytest.mark.slow
def test_a_future_and_a_callback_hear_of_the_end(groups: list[ProcessGroup]) -> None:
    x, heard = torch.zeros(1), threading.Event()
    work = groups[1].recv([x], 0, 0)
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    work.record_end(heard.set)
    assert not heard.is_set()
    groups[0].send([torch.ones(1)], 1, 0).wait()
    assert future.wait().item() == 2
    assert heard.wait(30)


def test_a_receive_from_anybody_says_who_it_was(groups: list[ProcessGroup]) -> None:
    x = torch.zeros(1)
    work = groups[0].recv_anysource([x], 4)
    groups[1].send([torch.ones(1)], 0, 4).wait()
    work.wait()
    assert (work.source_rank(), x.item()) == (1, 1)


def test_the_event_loop_does_not_wait_for_a_message(worlds: list[Connection], groups: list[ProcessGroup]) -> None:
    x = torch.zeros(1)
    work = groups[1].recv([x], 0, 0)

    async def wait() -> bool:
        return bool(work.wait())

    with pytest.raises(dist.DistBackendError, match="waiting here would stop the event loop"):
        worlds[1].run(wait)
    groups[0].send([torch.ones(1)], 1, 0).wait()
    assert worlds[1].run(wait)


def test_numbers_of_messages_take_no_memory_without_end(
    groups: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlap.runtime.inbox._MOST_IDLE_LANES", 10)
    x = torch.zeros(1)
    for tag in range(100):
        groups[0].send([torch.ones(1)], 1, tag).wait()
        groups[1].recv([x], 0, tag).wait()
    for group in groups:
        inbox = group._group._messages._inbox
        assert not inbox.lanes
        assert len(inbox.numbers) <= 10


def test_groups_of_the_same_ranks_have_messages_of_their_own(
    worlds: list[Connection], groups: list[ProcessGroup]
) -> None:
    others = [ProcessGroup(dist.HashStore(), world.group([0, 1]), _LIMIT) for world in worlds]
    x, y = torch.zeros(1), torch.zeros(1)
    works = [others[1].recv([x], 0, 0), groups[1].recv([y], 0, 0)]
    groups[0].send([torch.ones(1)], 1, 0).wait()
    others[0].send([torch.full((1,), 2.0)], 1, 0).wait()
    assert all(work.wait() for work in works)
    assert (x.item(), y.item()) == (2, 1)


def test_numbers_that_are_not_finite_are_found_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_CHECK", "nan")
    with connected(2, dist.HashStore()) as worlds:
        with pytest.raises(dist.DistBackendError, match=r"send #0 to rank 1 .*nan"):
            on(worlds[0]).send([torch.full((1,), float("nan"))], 1, 0).wait()
        with pytest.raises(dist.DistBackendError, match=r"rank 0 failed before send #0 to rank 1"):
            on(worlds[1]).recv([torch.zeros(1)], 0, 0).wait()


@pytest.mark.parametrize("of_torch", [True, False], ids=["torch sends", "a rank sends"])
@pytest.mark.parametrize("anyone", [True, False], ids=["any source", "named"])
def test_messages_of_torch_and_of_ranks_meet(
    worlds: list[Connection], groups: list[ProcessGroup], anyone: bool, of_torch: bool
) -> None:
    """The shape of a tensor is open: only its dtype and the number of its elements must agree."""
    if of_torch:
        groups[0].send([torch.arange(6.0)], 1, 7).wait()
        got = worlds[1].rank.recv(((2, 3), "float32"), None if anyone else 0, tag=7)
        assert got.result(30).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert got.src == 0
        return
    worlds[0].rank.send(np.arange(6, dtype=np.float32).reshape(2, 3), 1, tag=7).result(30)
    x = torch.zeros(6)
    work = groups[1].recv_anysource([x], 7) if anyone else groups[1].recv([x], 0, 7)
    assert work.wait()
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert work.source_rank() == 0


def test_tags_of_torch_may_be_large(groups: list[ProcessGroup]) -> None:
    tags = [1 << 24, (1 << 24) + 1, 1 << 30, (1 << 31) - 1]
    taken = [torch.zeros(1) for _ in tags]
    works = [groups[1].recv([x], 0, tag) for x, tag in zip(taken, tags, strict=True)]
    for tag in reversed(tags):
        groups[0].send([torch.full((1,), float(tag))], 1, tag).wait()
    assert all(work.wait() for work in works)
    assert [x.item() for x in taken] == [float(torch.tensor(float(tag))) for tag in tags]
