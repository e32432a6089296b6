"""The version of the distribution, and the command that installs one of its extras."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for a checkout of overlap.

    A name alone would not do: the package index has another package with the name "overlap".
    """
    return f'pip install ".[{extra}]"'


def version() -> str:
    """Return the version, such as "0.1.0"."""
    try:
        return installed("overlap")
    except PackageNotFoundError:
        return _checkout_version(Path(__file__).parents[1])


def _checkout_version(root: Path) -> str:
    """Return the version in the `pyproject.toml` of a checkout, or "0+unknown" without one."""
    import tomllib

    try:
        document = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except OSError:
        return "0+unknown"  # the package was copied without metadata and `pyproject.toml`
    return str(document["project"]["version"])
