"""Transports by name: ours, and those that other packages bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from transports import ArgumentError, Efa, NeuronLink
from transports.factory import Bootstrap, UnknownTransportError, check, find, names

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
    efa = find("efa")(bootstrap(placement=[[0, 1], [2]], options={"rails": 2, "of another transport": None}))
    assert isinstance(efa, Efa)
    assert find("sockets") is find("efa")
    assert (efa.ranks, efa.peers) == ((0, 1), (2,))
    assert isinstance(find("neuronlink")(bootstrap()), NeuronLink)


def test_arguments_are_checked_by_the_transport() -> None:
    with pytest.raises(ArgumentError, match="neuronlink joins the ranks of one process; there are 2"):
        find("neuronlink")(bootstrap(placement=[[0], [1]]))
    with pytest.raises(ArgumentError, match="rails is 0; name 1 to 64 of them"):
        find("efa")(bootstrap(placement=[[0], [1]], options={"rails": 0}))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownTransportError, match=f"^'pidgin' is unknown; {NOBODY_INSTALLED}"):
        find("pidgin")


def test_an_installed_package_brings_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "pigeon", "pigeon_post:make", "def make(bootstrap): return ('pigeon', bootstrap.member)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check("pigeon")
    assert names() == ("efa", "neuronlink", "shared_memory", "sockets", "pigeon")
    assert find("pigeon")(bootstrap()) == ("pigeon", 0)
    with pytest.raises(UnknownTransportError, match=f"{NOBODY_INSTALLED}, pigeon"):
        check("pidgin")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_bird\n", r"^'lame' cannot be loaded from lame_bird \(lame_bird:make\): ModuleNotFoundError"),
        ("make = 'a name'\n", r"^'lame' \(lame_bird:make\) is 'a name'; a factory is called$"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "lame", "lame_bird:make", code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "lame_bird", raising=False)
    with pytest.raises(UnknownTransportError, match=reason):
        find("lame")
