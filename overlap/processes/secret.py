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

LENGTH_BYTES = 32  # of a generated secret; HMAC-SHA-256 gains nothing from longer ones
SHORTEST_BYTES = 8  # a shorter secret could be guessed from a recorded handshake
LONGEST_BYTES = 4096  # most bytes that are read from a file

VARIABLE = "OVERLAP_SECRET"
_removed: dict[str, str] = {}  # secrets from the environment of this process, by variable

ADVICE = "give every process the same OVERLAP_SECRET (`openssl rand -hex 32` makes one) or OVERLAP_SECRET_FILE"


def generate_secret() -> bytes:
    """Return a new random secret of `LENGTH_BYTES`."""
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


def find_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret from the first of the OVERLAP_SECRET variables that is set; None if none is.

    Raises:
        UsageError: The secret cannot be read, is too short, or its file can be read by other users.
    """
    if text := environ.get("OVERLAP_SECRET_FD"):
        try:
            return _check_strength("OVERLAP_SECRET_FD", os.pread(int(text), LONGEST_BYTES, 0))
        except (ValueError, OverflowError, OSError):
            expected = "expected a descriptor from `overlap run`"
            raise UsageError(f"OVERLAP_SECRET_FD: {expected}, got {text!r}; unset it, or {ADVICE}") from None
    if path := environ.get("OVERLAP_SECRET_FILE"):
        if (secret := _read_private_file(Path(path))) is None:
            raise UsageError(f"OVERLAP_SECRET_FILE: {path}: there is no such file; write a secret into it")
        return _check_strength("OVERLAP_SECRET_FILE", _decode_secret(secret))
    if text := _take_secret_variable(environ):
        return _check_strength("OVERLAP_SECRET", _decode_secret(text.encode()))
    return None


def check_secret_argument(name: str, secret: bytes | str) -> bytes:
    """Return the secret that a program has passed as an argument, as bytes; hexadecimal digits are decoded.

    Args:
        name: Name of the argument, for the error.
        secret: The argument.

    Raises:
        UsageError: The secret is of another type, or too short.
    """
    if not isinstance(secret, (bytes, str)):
        raise UsageError(f"{name}: expected bytes or text, got {type(secret).__name__}")
    return _check_strength(name, _decode_secret(secret.encode() if isinstance(secret, str) else secret))


def _take_secret_variable(environ: Mapping[str, str]) -> str | None:
    """Remove OVERLAP_SECRET from the environment of this process, and store it for later calls; other mappings stay."""
    if environ is not os.environ:
        return environ.get(VARIABLE)
    if text := os.environ.pop(VARIABLE, None):
        _removed[VARIABLE] = text
    return _removed.get(VARIABLE)


def user_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret that all processes of this user share on this machine; the first process makes it.

    So a script under `torchrun --nproc-per-node 4` needs no settings on one machine, and still no other user may join:
    the secret is in a file with mode 0600, in a folder with mode 0700, under `XDG_RUNTIME_DIR` or else the temporary
    folder. All jobs of the user share it: a program that may read one such file could read one for each job as well.
    The name of the job in the handshake lets a process join the right job.

    Raises:
        UsageError: The folder or the file does not belong to this user alone.
    """
    folder = Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"overlap-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _check_private(folder, folder.lstat(), stat.S_ISDIR)
    path = folder / "secret"
    if (secret := _read_private_file(path)) is not None:
        return _check_strength(str(path), secret)
    # Written under another name and then linked: no reader sees half a secret, and of two writers only one succeeds.
    with tempfile.NamedTemporaryFile(dir=folder) as new:
        new.write(generate_secret())
        new.flush()
        with suppress(FileExistsError):
            os.link(new.name, path)
    return _check_strength(str(path), _read_private_file(path) or b"")


def _read_private_file(path: Path) -> bytes | None:
    """Return None if there is no such file; raise `UsageError` if it cannot be read, or not by this user alone."""
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
    """Raise `UsageError` for a file or folder of another kind, of another user, or that others may read."""
    if not is_kind(status.st_mode):
        raise UsageError(f"{path}: no plain file or folder; remove it, or {ADVICE}")
    if status.st_uid != os.getuid():
        raise UsageError(f"{path}: belongs to user {status.st_uid}, and this process to user {os.getuid()}; {ADVICE}")
    if status.st_mode & 0o077:
        raise UsageError(f"{path}: others can read it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go= {path}")


def _decode_secret(secret: bytes) -> bytes:
    """Decode at least 32 hexadecimal digits; any other text is the secret itself, without outer spaces."""
    secret = secret.strip()
    if len(secret) >= LENGTH_BYTES:
        with suppress(ValueError):
            return bytes.fromhex(secret.decode("ascii"))
    return secret


def _check_strength(name: str, secret: bytes) -> bytes:
    """Return the secret; raise `UsageError` if it is so short that it could be guessed."""
    if len(secret) < SHORTEST_BYTES:
        raise UsageError(f"{name}: a secret of {len(secret)} bytes can be guessed; {ADVICE}")
    return secret
