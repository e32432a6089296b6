"""Memory that several processes map: it has no name, cannot change its size, and goes with the last who maps it."""

from __future__ import annotations

import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A mapped piece of memory; pages that nobody has touched take none.

    Attributes:
        nbytes: Its size.
        mapped: The mapping; it lasts as long as anything refers to it.
        view: Its bytes.
    """

    def __init__(self, mapped: mmap.mmap, fd: int) -> None:
        self.nbytes = len(mapped)
        self.mapped = mapped
        self.view = memoryview(mapped)
        self._fd = fd

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Make one of this process's own.

        Raises:
            OSError: The system does not give so much, or knows no such memory.
        """
        fd = os.memfd_create("overlap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(fd, nbytes), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of_another(cls, fd: int) -> Segment:
        """Map what another process has passed; the descriptor is closed.

        Raises:
            OSError: It cannot be mapped, or could shrink under those who use it.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("the memory that was passed is not sealed")
            return cls(mmap.mmap(fd, os.fstat(fd).st_size), -1)
        finally:
            os.close(fd)

    def fileno(self) -> int:
        """Return its descriptor, to be passed on; only of one's own, and before `passed`."""
        return self._fd

    def passed(self) -> None:
        """Close the descriptor: everybody has it. The mapping stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
