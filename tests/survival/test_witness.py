"""The witness of a job: its files are what they say from their first moment."""

from __future__ import annotations

import fcntl

from overlap.survival.agreement import Membership
from overlap.survival.witness import Witness


def test_a_member_is_never_seen_without_its_lock(tmp_path, monkeypatch):
    seen = []
    lock = fcntl.lockf

    def locked(file, how):
        seen.extend(path.name for path in tmp_path.rglob("alive-*"))
        lock(file, how)

    monkeypatch.setattr(fcntl, "lockf", locked)
    Witness(tmp_path, 0, 0, 1, Membership(epoch=0, members=(0, 1), step=0))
    assert seen == []
    assert [path.name for path in tmp_path.rglob("alive-*")] == ["alive-1"]
