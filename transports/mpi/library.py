"""The MPI library, imported when it is first needed: importing it starts MPI in this process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


def mpi() -> ModuleType:
    """Return ``mpi4py.MPI``.

    Raises:
        ImportError: It is not installed; the message says how to.
    """
    try:
        return import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        raise ImportError("mpi4py is not installed: pip install mpi4py") from error


def world() -> MPI.Intracomm:
    """Return the communicator of all processes that the launcher started."""
    return cast("MPI.Intracomm", mpi().COMM_WORLD)
