"""Check that the hosts of a job share the folder of its witness: with a folder each, two worlds would go on."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import trio

from ..errors import UsageError
from .join import Membership
from .place import ProcessPlace

#: Variable that names the folder of the witness to the processes of a job.
WITNESS = "OVERLAP_WITNESS"
#: Variable with the number of hosts of a job.
HOSTS = "OVERLAP_HOSTS"
#: Pause before a file is read again: a network file system may show it late.
_PAUSE_S = 0.2

_checked_folders: list[str] = []  # the folder that the processes of this job share


def host_file_path(folder: Path, host: int) -> Path:
    """Return the path of a host's file, in which its launcher writes a random number and the name of the host."""
    return folder / f"host-{host}"


async def check_shared_folder(own_place: ProcessPlace, membership: Membership, timeout_s: float) -> None:
    """Check, once in a job, that all hosts read the same file of the first host in the folder of the witness.

    Nothing happens without such a folder, on a single host, or after a loss.

    Args:
        own_place: Place of this process.
        membership: Connection to the processes of all hosts.
        timeout_s: How long to read again, because a network file system may show the file late.

    Raises:
        UsageError: On all processes: a host does not read the content that the first host has written.
    """
    folder, hosts = os.environ.get(WITNESS), int(os.environ.get(HOSTS) or 1)
    # after a loss there are fewer processes than the job has started, and the folder was compared before
    whole = own_place.processes == int(os.environ.get("OVERLAP_NNODES") or 0)
    if folder is None or hosts == 1 or not whole or _checked_folders:
        return
    first = (await membership.exchange("witness", await _read_first_hosts_file(folder)))[0]
    seen = False
    with trio.move_on_after(timeout_s):
        while not (seen := bool(first) and await _read_first_hosts_file(folder) == first):  # noqa: ASYNC110
            await trio.sleep(_PAUSE_S)
    # each process sends "" if it reads the file, and otherwise the name of its host
    name = b"" if seen else socket.gethostname().encode()
    for process, host in enumerate(await membership.exchange("witness read", name)):
        if host:
            node = process // (own_place.processes // hosts)
            reader = f"node {node} ({host.decode(errors='replace')})"
            fact = f"{reader} does not read in {folder} what node 0 has written there"
            raise UsageError(f"--witness: {fact}; name a folder on a file system that all hosts share")
    _checked_folders.append(folder)


async def _read_first_hosts_file(folder: str) -> bytes:
    """Return b"" if the file cannot be read yet."""
    with suppress(OSError):
        return await trio.to_thread.run_sync(host_file_path(Path(folder), 0).read_bytes, abandon_on_cancel=True)
    return b""
