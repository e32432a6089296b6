"""Rendezvous of the processes of `connect`: at an address that all know, or one that rank 0 puts into a store."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeAlias

from ..errors import UsageError
from ..kernel_facts import network_namespace
from ..notice import notify
from ..processes.identity import JoinError, RendezvousConfig
from ..processes.launchers import is_loopback
from ..processes.secret import generate, user_secret
from ..processes.sockets import ListenError, format_endpoint, listen, local_address, parse_endpoint
from ..runtime.interrupts import interruptible
from ..threads import start_thread

_turns: Counter[object] = Counter()
"""Connections so far, by place and rank: connections that follow each other at one place must not mix."""

# Interval at which rank 0 looks for requests that replace those of an earlier attempt.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
LATE_S = 10.0
"""Seconds after which a late rank is named, as in a run without progress."""


#: How a process joins the others, and how many machines there are; each has equally many ranks, in order.
Meeting: TypeAlias = "tuple[RendezvousConfig, int]"


class RendezvousStore(Protocol):
    """A store of small values shared by several processes, such as a store of `torch.distributed`."""

    def set(self, key: str, value: bytes, /) -> object:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting until there is one."""


def rendezvous_at_endpoint(
    text: str, rank: int, size: int, *, secret: bytes | None, job: str, nodes: int | None
) -> Meeting:
    """Return the rendezvous at an endpoint that all processes know.

    Raises:
        UsageError: If it is no endpoint, or others could join there.
    """
    try:
        endpoint = parse_endpoint(text)
    except UsageError as error:
        raise UsageError(f"endpoint: {error}") from None
    if endpoint[1] == 0:
        raise UsageError(
            f"endpoint: {text!r} has no port where others could look for it; use store= to find a free one"
        )
    if secret is None and not is_loopback(endpoint[0]):
        raise UsageError(
            f"secret: whoever reaches {format_endpoint(endpoint)} could join; give every process the same secret="
        )
    machines = _check_nodes(nodes or (1 if is_loopback(endpoint[0]) else size), size)
    config = RendezvousConfig(
        job=job,
        epoch=_count_connection(endpoint, job, rank, size),
        member=rank,
        members=size,
        secret=secret or user_secret(),
        endpoint=endpoint,
    )
    return config, machines


@contextmanager
def rendezvous_through_store(
    store: RendezvousStore, rank: int, size: int, *, secret: bytes | None, job: str, nodes: int | None, host: str | None
) -> Iterator[Meeting]:
    """Yield the rendezvous at a free port of rank 0, which the store passes on with a secret for this connection.

    A store may outlive processes, as that of an elastic agent does, and then holds the values of an earlier attempt. So
    each rank asks with a number of its own, and rank 0 answers that number: an answer is never from an earlier attempt.
    Rank 0 answers for the length of the block, because the first question that it reads may be an old one.

    Raises:
        JoinError: If the store has a value of another program.
    """
    turn = _count_connection("store", job, rank, size)
    try:
        if rank:
            ask = f"{secrets.token_hex(8)} {network_namespace()}"
            store.set(_ask_key(job, rank, turn), ask.encode())
            key = _answer_key(job, rank, ask, turn)
            with _warn_if_late(rank, 0):
                answer = _wait_for_value(store, key)
        else:
            asks: dict[int, str] = {}
            for other in range(1, size):
                with _warn_if_late(rank, other):
                    asks[other] = _wait_for_value(store, _ask_key(job, other, turn)).decode()
    except BaseException:
        _turns["store", job, rank, size] -= 1  # nobody was met: the next attempt asks where the others wait
        raise
    if rank:
        yield _parse_answer(answer, key, rank, size, secret)
        return
    machines = [network_namespace(), *(ask.partition(" ")[2] for ask in asks.values())]
    address = host or ("127.0.0.1" if len(set(machines)) == 1 else _find_outward_address())
    try:
        listener = listen((address, 0))
    except ListenError as error:
        raise UsageError(f"host: rank 0 {error}; pass host= an address of its machine") from error
    rendezvous = {
        "endpoint": [address, listener.getsockname()[1]],
        "secret": (secret or generate()).hex(),
        "job": f"{job}-{secrets.token_hex(8)}",
        "nodes": _check_nodes(nodes, size) if nodes else _count_nodes(machines),
    }
    answer = json.dumps(rendezvous).encode()
    config, nodes = _parse_answer(answer, job, rank, size, secret)
    with _answer_requests(store, job, turn, asks, answer):
        yield replace(config, listener=listener), nodes


@interruptible
def _wait_for_value(store: RendezvousStore, key: str) -> bytes:
    """Return a value of the store once it is there; an interrupt ends the wait."""
    return bytes(store.get(key))


@contextmanager
def _warn_if_late(rank: int, other: int) -> Iterator[None]:
    """Name a rank that does not arrive at the store in time: the store's own time-out may be half an hour."""
    why = "which has not connected, or is stopped" if other else "which has not connected, or waits for others"
    message = (
        f"rank {rank} has waited {LATE_S:g} s at the store for rank {other}, {why}; the store's time-out ends that"
    )
    timer = threading.Timer(LATE_S, notify, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ask_key(job: str, rank: int, turn: int = 0) -> str:
    """Return the key under which a rank requests the rendezvous; `turn` counts the connections of one job."""
    return f"overlap/{job}/{turn}/asks/{rank}"


def _answer_key(job: str, rank: int, ask: str, turn: int = 0) -> str:
    return f"overlap/{job}/{turn}/answer/{rank}/{ask.partition(' ')[0]}"


@contextmanager
def _answer_requests(
    store: RendezvousStore, job: str, turn: int, asks: dict[int, str], answer: bytes
) -> Iterator[None]:
    """Answer the request of each rank, and every later one for the length of the block."""
    ended = threading.Event()

    def answer_new() -> None:
        """Answer each request that has changed since the last look."""
        for rank, last_ask in asks.items():
            ask = _wait_for_value(store, _ask_key(job, rank, turn)).decode()
            if ask != last_ask:
                asks[rank] = ask
                store.set(_answer_key(job, rank, ask, turn), answer)

    def watch() -> None:
        """Look for new requests until the block ends, less often the longer it takes."""
        pause_s = _FIRST_PAUSE_S
        with suppress(Exception):  # the store is closed; the call of a rank that still asks raises that error
            while not ended.wait(pause_s):
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                answer_new()

    for rank, ask in asks.items():
        store.set(_answer_key(job, rank, ask, turn), answer)
    watcher = threading.Thread(target=watch, name="overlap answers in the store", daemon=True)
    start_thread(watcher)
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _parse_answer(answer_bytes: bytes, key: str, rank: int, size: int, secret: bytes | None) -> Meeting:
    """Return the rendezvous that rank 0 has written to a store."""
    try:
        answer = json.loads(answer_bytes)
        host, port = answer["endpoint"]
        config = RendezvousConfig(
            job=str(answer["job"]),
            member=rank,
            members=size,
            secret=secret or bytes.fromhex(answer["secret"]),
            endpoint=(str(host), int(port)),
        )
        return config, int(answer["nodes"])
    except (ValueError, KeyError, TypeError) as error:
        raise JoinError(
            f"store: rank 0 of overlap.connect did not write the value of {key!r}; use a new store, or another job="
        ) from error


def _count_connection(place: object, job: str, rank: int, size: int) -> int:
    """Count a connection of a rank at an endpoint or store; return its number there, from 0."""
    key = (place, job, rank, size)
    _turns[key] += 1
    return _turns[key] - 1


def _check_nodes(nodes: int, size: int) -> int:
    """Refuse numbers of machines that do not divide the ranks."""
    if not isinstance(nodes, int) or nodes < 1 or size % nodes:
        raise UsageError(f"nodes: expected a number of machines that divides the {size} ranks, got {nodes!r}")
    return nodes


def _count_nodes(machines: Sequence[str]) -> int:
    """Return the number of machines, if they have equally many ranks in order; else each rank counts as one."""
    different = list(dict.fromkeys(machines))
    in_order = [machine for machine in different for _ in range(len(machines) // len(different))] == list(machines)
    return len(different) if in_order else len(machines)


def _find_outward_address() -> str:
    """Return the address of this machine that other machines probably reach."""
    with suppress(OSError):
        return local_address(("192.0.2.1", 9))  # RFC 5737: an address for documentation, on no host
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
