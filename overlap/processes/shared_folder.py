"""Check that the hosts of a job share the folder of its witness: with a folder each, two worlds would go on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import trio

from ..errors import UsageError
from .join import Membership
from .place import Place

#: Variable that names the folder of the witness to the processes of a job.
WITNESS = "OVERLAP_WITNESS"
#: Variable with the number of hosts of a job.
HOSTS = "OVERLAP_HOSTS"
#: Pause before a file is read again: a network file system may show it late.
_PAUSE_S = 0.2

_checked: list[str] = []  # the folder that the processes of this job share


def host_file(folder: Path, host: int) -> Path:
    """Return the file with a random number and the name of a host, which its launcher writes and removes."""
    return folder / f"host-{host}"


async def check_shared_folder(own_place: Place, membership: Membership, timeout_s: float) -> None:
    """Compare what the launchers have written into the folder with what their processes send; once in a job.

    Args:
        own_place: Place of this process.
        membership: Connection to the processes of all hosts.
        timeout_s: How long to read again.

    Raises:
        UsageError: On all processes: a host does not read what another one has written.
    """
    folder, hosts = os.environ.get(WITNESS), int(os.environ.get(HOSTS) or 1)
    whole = own_place.processes == int(os.environ.get("OVERLAP_NNODES") or 0)
    if folder is None or hosts == 1 or not whole or _checked:
        return
    each = own_place.processes // hosts
    own = own_place.process // each
    sent = await membership.exchange("witness", await _read(folder, own) or b"nothing of this host")
    lacking = {host: part for host, part in enumerate(sent[::each]) if host != own}
    with trio.move_on_after(timeout_s):
        while True:
            lacking = {host: part for host, part in lacking.items() if await _read(folder, host) != part}
            if not lacking:
                break
            await trio.sleep(_PAUSE_S)
    missing = ", ".join(f"node {host} ({_name(part)})" for host, part in lacking.items())
    reason = f"node {own} ({_name(sent[own * each])}) cannot read the file of {missing} in {folder}" if missing else ""
    for each_reason in await membership.exchange("witness read", reason.encode()):
        if each_reason:
            raise UsageError(f"--witness: {each_reason.decode()}; name a folder on a file system that all hosts share")
    _checked.append(folder)


def _name(part: bytes) -> str:
    """Return the name of the host that has written a file."""
    return part.decode(errors="replace").partition(" ")[2]


async def _read(folder: str, host: int) -> bytes:
    """Return the content of a host's file; nothing if there is none yet, or it cannot be read."""
    with suppress(OSError):
        return await trio.to_thread.run_sync(host_file(Path(folder), host).read_bytes, abandon_on_cancel=True)
    return b""
