"""Secret of a job, which proves membership: its sources, and how it is passed to processes.

A process that knows the secret of a job is a member of it, so the secret is never printed, logged, or put into a
`repr`, and it is never on a command line. In the order of precedence:

1. `OVERLAP_SECRET_FD`: a descriptor that `overlap run` has passed down, of a file without a name.
2. `OVERLAP_SECRET_FILE`: a file that only its owner may read.
3. `OVERLAP_SECRET`: the secret itself; hexadecimal digits, at least 32 of them, are read as bytes. A process removes it
   from its environment when it reads it, so that children and printed environments lack it.
4. `user_secret`: only for processes of one machine that another launcher has started.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import UsageError

LENGTH_BYTES = 32  # of generated ones; more than HMAC-SHA-256 can use
SHORTEST_BYTES = 8  # a recorded handshake permits to try short secrets offline
LONGEST_BYTES = 4096  # of a file: a secret, and not a mistaken path

VARIABLE = "OVERLAP_SECRET"
_removed: dict[str, str] = {}  # secrets from the environment of this process, by variable

ADVICE = "give every process the same OVERLAP_SECRET (`openssl rand -hex 32` makes one) or OVERLAP_SECRET_FILE"


def generate() -> bytes:
    """Return a new secret."""
    return secrets.token_bytes(LENGTH_BYTES)


def write_to_nameless_file(secret: bytes) -> int:
    """Return a descriptor of a nameless file that holds the secret; children inherit it, and the caller closes it."""
    try:
        descriptor = os.memfd_create("overlap")
    except (AttributeError, OSError):  # not on this system, or forbidden in this container
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.write(descriptor, secret)
    return descriptor


def given_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret that the environment names, or None.

    Raises:
        UsageError: If it names one that cannot be read, is too short, or that others can read.
    """
    if text := environ.get("OVERLAP_SECRET_FD"):
        return _read_inherited(text)
    if path := environ.get("OVERLAP_SECRET_FILE"):
        if (secret := _read_private_file(Path(path))) is None:
            raise UsageError(f"OVERLAP_SECRET_FILE: {path}: there is no such file; write a secret into it")
        return _check_strength("OVERLAP_SECRET_FILE", _decode_hex(secret))
    if text := _secret_from_variable(environ):
        return _check_strength("OVERLAP_SECRET", _decode_hex(text.encode()))
    return None


def strong_secret(name: str, secret: bytes | str) -> bytes:
    """Return the secret of a program's argument, as bytes.

    Raises:
        UsageError: If it is of another type, or too short.
    """
    if not isinstance(secret, (bytes, str)):
        raise UsageError(f"{name}: expected bytes or text, got {type(secret).__name__}")
    return _check_strength(name, _decode_hex(secret.encode() if isinstance(secret, str) else secret))


def _secret_from_variable(environ: Mapping[str, str]) -> str | None:
    """Return the value of OVERLAP_SECRET and remove it from the environment; later worlds get the stored value."""
    if environ is not os.environ:
        return environ.get(VARIABLE)
    if text := os.environ.pop(VARIABLE, None):
        _removed[VARIABLE] = text
    return _removed.get(VARIABLE)


def user_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret that all processes of this user share on this machine; the first process makes it.

    A script under `torchrun --nproc-per-node 4` needs no settings on one machine, and still no stranger may join: the
    secret is in a file with mode 0600, in a folder with mode 0700, under `XDG_RUNTIME_DIR` or else the temporary
    folder. It belongs to the user and not to the job: a program that may read one such file may read them all, and
    trace the processes too, so a file for each job would protect nothing and leave files behind. The name of the job in
    the handshake lets a process join the right one.

    Raises:
        UsageError: If the folder or the file is not this user's alone.
    """
    folder = Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"overlap-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _check_private(folder, folder.lstat(), stat.S_ISDIR)
    path = folder / "secret"
    if (secret := _read_private_file(path)) is not None:
        return _check_strength(str(path), secret)
    # Written under a name of its own and linked: no reader sees half of it, and of two writers one wins.
    with tempfile.NamedTemporaryFile(dir=folder) as new:
        new.write(generate())
        new.flush()
        with suppress(FileExistsError):
            os.link(new.name, path)
    return _check_strength(str(path), _read_private_file(path) or b"")


def _read_inherited(text: str) -> bytes:
    """Return the secret in the file whose descriptor `overlap run` has passed on."""
    try:
        return _check_strength("OVERLAP_SECRET_FD", os.pread(int(text), LONGEST_BYTES, 0))
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"OVERLAP_SECRET_FD: expected a descriptor from `overlap run`, got {text!r}; unset it, or {ADVICE}"
        ) from None


def _read_private_file(path: Path) -> bytes | None:
    """Read a file that only this user may read; None if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; {ADVICE}") from None
    try:
        _check_private(path, os.fstat(descriptor), stat.S_ISREG)
        return os.read(descriptor, LONGEST_BYTES)
    finally:
        os.close(descriptor)


def _check_private(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Refuse a file or folder of another kind, of another user, or that others may read."""
    if not is_kind(status.st_mode):
        raise UsageError(f"{path}: no plain file or folder; remove it, or {ADVICE}")
    if status.st_uid != os.getuid():
        raise UsageError(f"{path}: belongs to user {status.st_uid}, and this process to user {os.getuid()}; {ADVICE}")
    if status.st_mode & 0o077:
        raise UsageError(f"{path}: others can read it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go= {path}")


def _decode_hex(secret: bytes) -> bytes:
    """Return the bytes of a secret in hexadecimal digits; any other text is the secret itself."""
    secret = secret.strip()
    if len(secret) >= LENGTH_BYTES:
        with suppress(ValueError):
            return bytes.fromhex(secret.decode("ascii"))
    return secret


def _check_strength(name: str, secret: bytes) -> bytes:
    """Return the secret, unless it is short enough to be guessed."""
    if len(secret) < SHORTEST_BYTES:
        raise UsageError(f"{name}: a secret of {len(secret)} bytes can be guessed; {ADVICE}")
    return secret
