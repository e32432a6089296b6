"""Rendezvous of the processes of `connect`: at an endpoint that all know, or at one that rank 0 puts into a store."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol, TypeAlias

from ..errors import UsageError
from ..kernel_facts import network_namespace
from ..notice import notify
from ..processes.identity import JoinError, RendezvousConfig
from ..processes.launchers import is_loopback
from ..processes.place import count_even_nodes
from ..processes.secret import generate_secret, user_secret
from ..processes.sockets import ListenError, format_endpoint, listen, local_address, parse_endpoint
from ..runtime.interrupts import interruptible
from ..threads import start_thread

_turns: Counter[object] = Counter()
"""Number of connections so far, by (endpoint or "store", job, rank, size), so that successive ones are not mixed up."""

# Interval at which rank 0 looks for requests that replace those of an earlier attempt.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
LATE_S = 10.0
"""Seconds after which a notice names a late rank, as in a run without progress."""


#: The configuration with which a process joins the others, and the number of machines, each with equally many ranks.
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

    Args:
        text: The endpoint, as "HOST:PORT".
        rank: Index of this rank.
        size: Number of ranks.
        secret: Proof of membership; None: the secret of this user, which only the loopback interface allows.
        job: Name of the job.
        nodes: Number of machines; None: one on the loopback interface, otherwise one for each rank.

    Raises:
        UsageError: The text is no endpoint, has no port, or needs a secret; or `nodes` does not divide the ranks.
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
    """Yield the rendezvous at a free port of rank 0, which sends it to the others through the store, with a secret.

    A store may outlive processes, as that of an elastic agent does, and then has values of an earlier attempt. So each
    rank writes a request with a random number, and rank 0 answers under that number: an answer is never of an earlier
    attempt. The first request that rank 0 reads may be an old one; so it answers new requests for the length of the
    block.

    Args:
        store: The store.
        rank: Index of this rank.
        size: Number of ranks.
        secret: Proof of membership; None: one that rank 0 generates.
        job: Name of the job.
        nodes: On rank 0, the number of machines; None: it is detected.
        host: On rank 0, the name or address at which the other ranks reach it; None: it is detected.

    Raises:
        JoinError: The store has a value of another program.
        UsageError: Rank 0 cannot listen at `host`, or `nodes` does not divide the ranks.
    """
    turn = _count_connection("store", job, rank, size)
    asks: dict[int, str] = {}
    try:
        if rank:
            key, answer = _ask_rank_0(store, job, turn, rank)
        for other in range(1, size) if rank == 0 else ():
            with _reporting_late_rank(rank, other):
                asks[other] = _wait_for_value(store, _ask_key(job, other, turn)).decode()
    except BaseException:
        _turns["store", job, rank, size] -= 1  # the next attempt uses this number again, under which others wait
        raise
    if rank:
        yield _parse_answer(answer, key, rank, size, secret)
        return
    # a request is "NUMBER NAMESPACE"; processes of one machine have one network namespace
    machines = [network_namespace(), *(ask.partition(" ")[2] for ask in asks.values())]
    address = host or ("127.0.0.1" if len(set(machines)) == 1 else _find_outward_address(store))
    try:
        listener = listen((address, 0))
    except ListenError as error:
        raise UsageError(f"host: rank 0 {error}; pass host= an address of its machine") from error
    rendezvous = {
        "endpoint": [address, listener.getsockname()[1]],
        "secret": (secret or generate_secret()).hex(),
        "job": f"{job}-{secrets.token_hex(8)}",
        "nodes": _check_nodes(nodes, size) if nodes else count_even_nodes(machines),
    }
    answer = json.dumps(rendezvous).encode()
    config, nodes = _parse_answer(answer, job, rank, size, secret)
    with _answer_requests(store, job, turn, asks, answer):
        yield replace(config, listener=listener), nodes


def _ask_rank_0(store: RendezvousStore, job: str, turn: int, rank: int) -> tuple[str, bytes]:
    """Request the rendezvous from rank 0, and wait; return the key and the value of the answer."""
    ask = f"{secrets.token_hex(8)} {network_namespace()}"
    store.set(_ask_key(job, rank, turn), ask.encode())
    key = _answer_key(job, rank, ask, turn)
    with _reporting_late_rank(rank, 0):
        return key, _wait_for_value(store, key)


@interruptible
def _wait_for_value(store: RendezvousStore, key: str) -> bytes:
    """Wait until the store has a value, and return it; an interrupt ends the wait."""
    return bytes(store.get(key))


@contextmanager
def _reporting_late_rank(rank: int, other: int) -> Iterator[None]:
    """Print a notice if the block takes longer than `LATE_S`: the store's own time-out may be half an hour."""
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
    """Return the key under which a rank writes its request; `turn` is the number of the connection in its job."""
    return f"overlap/{job}/{turn}/asks/{rank}"


def _answer_key(job: str, rank: int, ask: str, turn: int = 0) -> str:
    """Return the key of the answer to a rank's request `ask`, "NUMBER NAMESPACE", of which it has the number."""
    return f"overlap/{job}/{turn}/answer/{rank}/{ask.partition(' ')[0]}"


@contextmanager
def _answer_requests(
    store: RendezvousStore, job: str, turn: int, asks: dict[int, str], answer: bytes
) -> Iterator[None]:
    """Answer the request of each rank, and later ones for the length of the block; `asks` gets the last by rank."""
    ended = threading.Event()

    def answer_new_requests() -> None:
        for rank, last_ask in asks.items():
            ask = _wait_for_value(store, _ask_key(job, rank, turn)).decode()
            if ask != last_ask:
                asks[rank] = ask
                store.set(_answer_key(job, rank, ask, turn), answer)

    def answer_until_end() -> None:
        """Answer new requests until the block ends, with growing pauses."""
        pause_s = _FIRST_PAUSE_S
        with suppress(Exception):  # the store was closed; a rank that still waits for an answer gets that error itself
            while not ended.wait(pause_s):
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                answer_new_requests()

    for rank, ask in asks.items():
        store.set(_answer_key(job, rank, ask, turn), answer)
    watcher = threading.Thread(target=answer_until_end, name="overlap answers in the store", daemon=True)
    start_thread(watcher)
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _parse_answer(answer_bytes: bytes, key: str, rank: int, size: int, secret: bytes | None) -> Meeting:
    """Return the rendezvous in a value of the store; raise JoinError if the value is of another program.

    If `secret` is None, the secret is that in the answer. The key is for the error.
    """
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
    """Count a connection of a rank at an endpoint or "store", and return its number there, from 0."""
    key = (place, job, rank, size)
    _turns[key] += 1
    return _turns[key] - 1


def _check_nodes(nodes: int, size: int) -> int:
    """Return `nodes`, a number of machines; raise `UsageError` if it does not divide `size`, the number of ranks."""
    if not isinstance(nodes, int) or nodes < 1 or size % nodes:
        raise UsageError(f"nodes: expected a number of machines that divides the {size} ranks, got {nodes!r}")
    return nodes


def _find_outward_address(store: RendezvousStore) -> str:
    """Return the address of this machine that others probably reach: that from which it reaches the store's host.

    If a store tells none, as `dist.TCPStore` does, or one on the loopback interface, it is that of the default route.
    """
    while hasattr(store, "underlying_store"):  # a `dist.PrefixStore`
        store = store.underlying_store
    for host in (getattr(store, "host", None), "192.0.2.1"):  # an address that no host has (RFC 5737)
        with suppress(OSError):
            if host and not is_loopback(address := local_address((host, 9))):
                return address
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
