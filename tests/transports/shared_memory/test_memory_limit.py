"""The memory of a container, with the files of control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transports.shared_memory.joining import MemoryJoining
from transports.shared_memory.memory_limit import memory_bytes

MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "67108864\n"}, 1 << 26),
        ("0::/\n", {"memory.max": "max\n"}, MACHINE_BYTES),
        ("0::/job/rank\n", {"job/memory.max": "67108864\n", "job/rank/memory.max": "max\n"}, 1 << 26),
        ("0::/outside/this\n", {"memory.max": "67108864\n"}, 1 << 26),
        ("3:cpu:/\n2:memory:/docker/7\n", {"memory/memory.limit_in_bytes": "67108864\n"}, 1 << 26),
        ("2:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, MACHINE_BYTES),
        (None, {}, MACHINE_BYTES),
    ],
)
@pytest.mark.everyday(7)
def test_the_smallest_limit_counts(tmp_path: Path, groups: str | None, files: dict[str, str], limit: int) -> None:
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_bytes(tmp_path) == limit


def test_a_segment_is_a_share_of_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.shared_memory.joining.memory_bytes", lambda: 1 << 28)
    joining = MemoryJoining.__new__(MemoryJoining)
    joining.members, joining._limit_bytes = 2, None
    segment = joining._make_segment()
    assert segment.nbytes == 1 << 26
    segment.view.release()
