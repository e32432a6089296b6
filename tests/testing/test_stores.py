"""Stores of PyTorch's programs in a test, and checkpoints that are saved in a thread."""

import os
import threading
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest

from overlap.testing import Ranks, RanksFailed

# -- stores of PyTorch's programs in a test: requests hand on the turn, and ranks meet at servers of their own ---------

torch = pytest.importorskip("torch", reason="torch is not installed")
dist = torch.distributed


def default_store():
    dist.init_process_group("gloo")
    return dist.PrefixStore("test", dist.distributed_c10d._get_default_store())


def polls() -> None:
    store = default_store()
    store.add("arrived", 1)
    while store.add("arrived", 0) < dist.get_world_size():
        pass
    if dist.get_rank() == 1:
        store.set("over", "1")
    while not store.check(["over"]):
        pass
    store.set(f"rank {dist.get_rank()}", "1")
    while store.num_keys() < 2 + dist.get_world_size():
        pass


def test_polling_a_store_lets_the_others_go_on() -> None:
    run = Ranks().function(polls, ranks=3, seeds=4, real_timeout_s=20)
    assert [each.verdicts for each in run.runs] == [[]] * 4


def asks_for_everything() -> list[object]:
    store = default_store()
    store.multi_set(["a", "b"], ["1", "2"])
    store.append("b", "3")
    store.append("c", "4")
    there = store.multi_get(["a", "b", "c"])
    return [*there, store.num_keys(), store.delete_key("a"), store.delete_key("a"), store.num_keys()]


def test_each_request_through_a_prefix_has_its_answer() -> None:
    assert Ranks().function(asks_for_everything, ranks=1).results == [[b"1", b"23", b"4", 3, True, False, 2]]


def takes_tasks() -> list[int]:
    store = default_store()
    store.compare_set("next", "", "0")
    mine = []
    while (task := int(store.get("next"))) < 5:
        store.set("next", str(task + 1))
        mine.append(task)
    return mine


def counts_tasks() -> list[int]:
    store = default_store()
    mine = []
    while (task := store.add("next", 1) - 1) < 5:
        mine.append(task)
    return mine


@pytest.mark.slow
def test_other_ranks_come_between_two_requests_of_one() -> None:
    run = Ranks().function(takes_tasks, ranks=2)
    assert sum(map(len, run.results)) > 5
    for each in Ranks().function(counts_tasks, ranks=3, seeds=6).runs:
        assert sorted(chain.from_iterable(each.results)) == list(range(5))


def passes_two_barriers() -> None:
    store = default_store()
    for round in range(2):
        if dist.get_rank() == 0:
            store.set(f"round {round}", "1")
        store.add("arrived", 1)
        while store.add("arrived", 0) < dist.get_world_size():
            pass
        assert store.check([f"round {round}"])


@pytest.mark.slow
def test_a_barrier_that_counts_on_is_found_to_let_ranks_through() -> None:
    with pytest.raises(RanksFailed, match="AssertionError"):
        Ranks().function(passes_two_barriers, ranks=4, seeds=20, real_timeout_s=20)


def serves() -> list[bytes]:
    dist.init_process_group("gloo")
    rank, size, port = dist.get_rank(), dist.get_world_size(), torch.tensor([0])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, timedelta(seconds=30), wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, src=0)
    if rank:
        store = dist.TCPStore("localhost", int(port), size, False)
    assert isinstance(store, dist.TCPStore)
    mine = dist.PrefixStore("mine", store.clone())
    mine.set(f"{rank}", f"of {rank}")
    return [mine.get(str(other)) for other in reversed(range(size))]  # blocks


@pytest.mark.slow
def test_a_server_of_the_programs_own_is_that_of_all_who_name_its_port() -> None:
    for run in Ranks().function(serves, ranks=3, seeds=4, real_timeout_s=20).runs:
        assert run.results == [[b"of 2", b"of 1", b"of 0"]] * 3


def serves_before_it_joins() -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("localhost", 29500, size, rank == 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return store.add("joined", 1)


def test_clients_wait_for_their_server_and_the_server_for_its_clients() -> None:
    assert sorted(Ranks().function(serves_before_it_joins, ranks=3, real_timeout_s=20).results) == [1, 2, 3]


def waits_for_what_never_comes(how: str) -> None:
    default_store()
    limit = timedelta(seconds=7)
    if how == "client":
        dist.TCPStore("localhost", 1234, 2, False, limit)
    elif how == "server":
        dist.TCPStore("localhost", 1234, 3, dist.get_rank() == 0, limit)
        dist.barrier()
    elif how == "port":
        dist.TCPStore("localhost", 1234, 2, True, limit, wait_for_workers=False)
    else:
        dist.FileStore("meeting").wait(["key"], limit)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (
            "client",
            "DistNetworkError: The client socket has timed out after 7 s while trying to connect to (localhost, ",
        ),
        ("server", "DistStoreError: Timed out after 7 s waiting for clients. 2/3 joined."),
        ("port", "address already in use by the store of rank 0"),
        ("key", "DistStoreError: wait timeout after 7 s, keys: key"),
    ],
)
def test_what_never_comes_ends_with_the_error_of_torch(how, error) -> None:
    run = Ranks().function(waits_for_what_never_comes, how, ranks=2, check=False, real_timeout_s=20)
    assert error in str(run.verdict)


def meets_in_a_file() -> tuple[bytes, bool]:
    dist.init_process_group("gloo")
    file, own = dist.FileStore("meeting", dist.get_world_size()), dist.HashStore()
    own.set(str(dist.get_rank()), "1")
    file.set(str(dist.get_rank()), "1")
    file.wait(["0", "1"])
    return file.get("1"), own.check(["0", "1"])


def test_ranks_share_the_store_of_a_file_and_not_that_of_a_process() -> None:
    assert Ranks().function(meets_in_a_file, ranks=2, real_timeout_s=20).results == [(b"1", False)] * 2


def calls_remotely() -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc("worker", rank=0, world_size=2)


def communicates_in_a_thread(how: str) -> None:
    store = default_store()
    calls = {"all_reduce": lambda: dist.all_reduce(torch.ones(1)), "store": lambda: store.get("key")}
    thread = threading.Thread(target=calls[how])
    thread.start()
    thread.join()
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (calls_remotely, [], "the program communicates by torch.distributed.rpc"),
        (communicates_in_a_thread, ["all_reduce"], "a thread that the program of rank 0 has started communicates"),
        (communicates_in_a_thread, ["store"], "a thread that the program of rank 0 has started communicates"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_no_test_can_do_is_refused_at_its_line(function, args, reason) -> None:
    run = Ranks().function(function, *args, ranks=2, check=False, real_timeout_s=20)
    assert run.verdict.kind == "refused"
    assert str(run.verdict).startswith(f"refused: {run.verdict.lines[0]}: {reason}")
    assert run.verdict.lines[0].startswith("test_stores.py:")


# -- checkpoints that PyTorch saves in a thread of its own while its rank goes on --------------------------------------


HERE = Path(__file__).parent / "programs"


@pytest.mark.slow
def test_a_checkpoint_is_saved_beside_the_program_by_a_group_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Ranks(HERE).program("saves_beside.py", ["own"], ranks=3, seeds=6, real_timeout_s=30)
    assert run.restores("saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_save_that_shares_the_groups_of_the_program_is_found_in_another_order() -> None:
    run = Ranks(HERE).program("saves_beside.py", ranks=2, check=False, real_timeout_s=30)
    assert run.verdict.kind == "skipped"
    assert "saves_beside.py:13" in str(run.verdict)  # the line of async_save, whose thread communicates
