"""Transports by name, who is reached over which, and that their pure files know no I/O."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import transports
from tests.errors import error_from
from transports import ArgumentError, Efa, Envelope, NeuronLink, Recording, Router, TransportClosedError
from transports.factory import Bootstrap, UnknownTransportError, check_name, find_factory, known_names

# -- transports by name: ours, and those that other packages bring -----------------------------------------------------

NOBODY_INSTALLED = "known are efa, neuronlink, shared_memory, sockets"


async def alone(name: str, mine: bytes) -> list[bytes]:
    return [mine]


def bootstrap(**other: object) -> Bootstrap:
    usual: dict[str, object] = {"member": 0, "placement": [[0, 1]], "exchange": alone, "secret": b"of this test"}
    return Bootstrap(**{**usual, **other})  # type: ignore[arg-type]


def install(folder: Path, name: str, target: str, code: str) -> None:
    """Make a folder look as if a package had been installed there."""
    target_module = target.partition(":")[0]
    (folder / f"{target_module}.py").write_text(code)
    info = folder / f"{target_module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {target_module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[overlap.transports]\n{name} = {target}\n")


def test_ours_are_made_by_their_factories() -> None:
    efa = find_factory("efa")(bootstrap(placement=[[0, 1], [2]], options={"rails": 2, "of another transport": None}))
    assert isinstance(efa, Efa)
    assert find_factory("sockets") is find_factory("efa")
    assert (efa.ranks, efa.peers) == ((0, 1), (2,))
    assert isinstance(find_factory("neuronlink")(bootstrap()), NeuronLink)


def test_arguments_are_checked_by_the_transport() -> None:
    with pytest.raises(ArgumentError, match="neuronlink joins the ranks of one process; there are 2"):
        find_factory("neuronlink")(bootstrap(placement=[[0], [1]]))
    with pytest.raises(ArgumentError, match="rails: expected 1 to 64, or as many local addresses, got 0"):
        find_factory("efa")(bootstrap(placement=[[0], [1]], options={"rails": 0}))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownTransportError, match=f"^'pidgin' is an unknown transport; {NOBODY_INSTALLED}"):
        find_factory("pidgin")


def test_an_installed_package_brings_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "pigeon", "pigeon_post:make", "def make(bootstrap): return ('pigeon', bootstrap.member)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_name("pigeon")
    assert known_names() == ("efa", "neuronlink", "shared_memory", "sockets", "pigeon")
    assert find_factory("pigeon")(bootstrap()) == ("pigeon", 0)
    with pytest.raises(UnknownTransportError, match=f"{NOBODY_INSTALLED}, pigeon"):
        check_name("pidgin")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_bird\n", r"^'lame' cannot be loaded from lame_bird \(lame_bird:make\): ModuleNotFoundError"),
        ("make = 'a name'\n", r"^'lame' \(lame_bird:make\) is 'a name'; register a function$"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "lame", "lame_bird:make", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "lame_bird", raising=False)
    with pytest.raises(UnknownTransportError, match=reason):
        find_factory("lame")


# -- the router: who is reached over what ------------------------------------------------------------------------------


def parts() -> tuple[NeuronLink, Recording]:
    """Rank 0 and 1 in memory; the same two, and no others, over a wire that writes down what it sends."""
    return NeuronLink([0, 1]), Recording(NeuronLink([0, 1]))


async def test_the_first_part_that_reaches_a_rank_carries_the_message() -> None:
    memory, wire = parts()
    memory.peers = (0,)  # rank 1 is elsewhere
    async with Router([memory, wire]).open() as router, trio.open_nursery() as nursery:
        out = bytearray(1)
        nursery.start_soon(router.wire(0).send, 0, 5, b"a")
        await router.wire(0).recv_into(0, 5, out)
        nursery.start_soon(router.wire(0).send, 1, 6, b"b")
        with await wire.wire(1).recv(0, 6, 1) as delivery:
            out += delivery.view
    assert out == b"ab"
    assert [(sent.dst, sent.tag) for sent in wire.sent] == [(1, 6)]


def test_it_shows_what_it_is_made_of() -> None:
    memory, wire = parts()
    router = Router([memory, wire])
    assert (router.ranks, router.peers, router.shares_memory([0, 1])) == ((0, 1), (0, 1), True)
    assert not router.spans_hosts([0, 1])
    assert not Router([wire, memory]).shares_memory([0, 1])


def test_a_group_that_reaches_into_another_process_shares_no_memory() -> None:
    near, far = NeuronLink([0, 1]), NeuronLink([0, 1])
    far.peers = (2, 3)
    router = Router([near, far])
    assert router.peers == (0, 1, 2, 3)
    assert [router.shares_memory(ranks) for ranks in ([0, 1], [1], [0, 2], [2, 3], [0, 1, 2, 3])] == [
        *(True, True),
        *(False, False, False),
    ]


async def test_what_it_cannot_reach_is_named() -> None:
    memory, _ = parts()
    with pytest.raises(ArgumentError, match=r"^there is no rank 7 here; this router serves ranks 0, 1; ask for one"):
        Router([memory]).wire(7)
    with pytest.raises(ArgumentError, match=r"^parts: .* got no transport; name one or more"):
        Router([])
    with pytest.raises(ArgumentError, match=r"ranks \[0, 1\], NeuronLink of ranks \[0, 1, 2\]; name one or more"):
        Router([memory, NeuronLink(3)])
    with pytest.raises(ArgumentError, match=r"^rank 0 cannot reach rank 9; this router reaches ranks 0, 1$"):
        await Router([memory]).wire(0).send(9, 0, b"")


def split() -> tuple[Router, NeuronLink, NeuronLink]:
    """Rank 0 reaches itself over one part and rank 1 over another one."""
    near, far = NeuronLink([0, 1]), NeuronLink([0, 1])
    near.peers = (0,)
    return Router([near, far]), near, far


async def test_waiting_for_any_asks_every_part_that_is_named() -> None:
    router, _, far = split()
    end = router.wire(0)
    async with trio.open_nursery() as nursery:
        for sender, src in ((far.wire(1), 1), (end, 0)):
            found: list[Envelope] = []

            async def look(found: list[Envelope] = found) -> None:
                found.append(await end.wait_any([(0, 5), (1, 6)]))

            nursery.start_soon(look)
            await wait_all_tasks_blocked()
            assert found == []
            nursery.start_soon(sender.send, 0, 5 + src, b"x")
            await wait_all_tasks_blocked()
            assert found == [Envelope(src=src, dst=0, tag=5 + src, nbytes=1)]
            await end.recv_into(src, 5 + src, bytearray(1))


async def test_the_oldest_message_of_all_parts_is_first() -> None:
    router, near, far = split()
    end = router.wire(0)
    async with trio.open_nursery() as nursery:
        for src in (0, 0, 1, 0):
            nursery.start_soon((far if src else near).wire(src).send, 0, 5 + src, b"x")
            await wait_all_tasks_blocked()
        served = []
        for at_once in (False, False, True, True):
            choices = [(0, 5), (1, 6)]
            message = end.announced(choices) if at_once else await end.wait_any(choices)
            assert message is not None
            await end.recv_into(message.src, message.tag, bytearray(1))
            served.append(message.src)
        assert served == [0, 0, 1, 0]
        assert end.announced(choices) is None


async def test_waiting_for_any_fails_with_the_part_that_fails_and_can_be_cancelled() -> None:
    router, _, far = split()
    end = router.wire(0)
    with trio.move_on_after(0) as scope:
        await end.wait_any([(0, 5), (1, 6)])
    assert scope.cancelled_caught
    errors: list[TransportClosedError] = []

    async def look() -> None:
        errors.append(await error_from(TransportClosedError, end.wait_any([(0, 5), (1, 6)])))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await wait_all_tasks_blocked()
        await far.aclose()
    assert [(error.src, error.dst, error.tag) for error in errors] == [(1, 0, 6)]


# -- the pure files of transports know no I/O; `tests/test_house.py` finds imports that lead back ----------------------

ROOT = Path(transports.__file__).parent
FILES = {
    ".".join(("transports", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
PURE = [name for name in FILES if name.startswith("transports.matching")]
PURE += ["transports.frame", "transports.factory"]


def imports(name: str) -> Iterator[str]:
    """Every module that a file names, as far down as the name leads."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (one if one in FILES else node.module for one in inner)


@pytest.mark.parametrize("name", PURE)
def test_what_is_pure_waits_for_nothing(name: str) -> None:
    assert {one.partition(".")[0] for one in imports(name)} & {
        "trio",
        "socket",
        "asyncio",
        "threading",
        "mpi4py",
    } == set()
