"""Checks of software: the versions of Python, of needed packages and extras, and packages that shadow ours."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path

from ...version import install_command
from ...version import version as own_version
from .finding import CheckResult

_EXTRAS = {
    "torch": "the backend of torch.distributed",
    "ray": "overlap.ray",
}
"""Extras of the distribution, and what each is for."""

_OURS = ("overlap", "topology", "transports")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(\[[^]]*])?([^;]*)(?:;(.*))?$")
_BOUND = re.compile(r">=\s*([0-9.]+)")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


def findings(installed: Callable[[str], str] = version) -> Iterator[CheckResult]:
    """Yield the findings about Python, packages and extras.

    Args:
        installed: Returns the version of a distribution, or raises `PackageNotFoundError`.
    """
    yield CheckResult(subject="overlap", state="good", text=f"{own_version()} in {Path(__file__).parents[3]}")
    text = f"{sys.version.split()[0]} ({sys.implementation.name}), {sys.executable}"
    yield CheckResult(subject="python", state="good", text=text)  # an older one cannot read this file
    yield from _packages(_own_requirements(), installed)
    yield from shadowing(sys.path)


def _own_requirements() -> Sequence[str]:
    """Return the requirements of this package; none in a checkout that is not installed."""
    try:
        return requires("overlap") or []
    except PackageNotFoundError:  # a checkout that is not installed
        return []


def _packages(requirements: Sequence[str], installed: Callable[[str], str]) -> Iterator[CheckResult]:
    """Yield a finding for all packages that are always needed, and one for each package of an extra."""
    good: list[str] = []
    for name, least, extra in map(_read_requirement, requirements):
        if extra is not None and (extra not in _EXTRAS or name == "overlap"):
            continue
        fix = install_command(extra) if extra else f'pip install "{name}>={least}"'
        try:
            present = installed(name)
        except PackageNotFoundError:
            purpose = f"is not installed: {_EXTRAS[extra]}" if extra else "is not installed"
            state = CheckResult(subject=name, state="missing" if extra else "wrong", text=purpose, fix=fix)
            yield state
            continue
        if least and numbers(present) < numbers(least):
            yield CheckResult(subject=name, state="wrong", text=f"{present} is older than {least}, the lowest", fix=fix)
        else:
            good.append(f"{name} {present}")
    if good:
        yield CheckResult(subject="packages", state="good", text=", ".join(good))


def _read_requirement(requirement: str) -> tuple[str, str, str | None]:
    """Return the name of a requirement, its lowest version, and its extra."""
    match = _REQUIREMENT.match(requirement)
    assert match is not None, requirement
    least, extra = _BOUND.search(match[3] or ""), _EXTRA.search(match[4] or "")
    return match[1], least[1] if least else "", extra[1] if extra else None


def numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: `2.13.0+cpu` is (2, 13, 0)."""
    leading = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def shadowing(path: Sequence[str]) -> Iterator[CheckResult]:
    """Yield a finding for each package of the path that has one of our names and is not ours.

    Args:
        path: Folders in which Python looks for packages, as `sys.path`.
    """
    ours = Path(__file__).parents[3]
    for name in _OURS:
        spec = find_spec(name)
        used = Path(spec.origin).parent.parent if spec is not None and spec.origin else None
        if used is not None and used.resolve() != ours.resolve():
            text = f"another package of this name is used: {used / name}"
            yield CheckResult(subject=name, state="wrong", text=text, fix=f"rename {used / name}, or uninstall it")
        for folder in {Path(each or ".").resolve() for each in path} - {ours.resolve()}:
            if (folder / name / "__init__.py").is_file() and folder != used:
                text = f"{folder / name} has the same name; a program that is started there may import it"
                yield CheckResult(subject=name, state="note", text=text)
    others = {each.metadata["Summary"] for each in distributions() if (each.metadata["Name"] or "") == "overlap"}
    if len(others) > 1:
        text = f"several distributions of this name are installed: {', '.join(sorted(map(str, others)))}"
        yield CheckResult(subject="overlap", state="wrong", text=text, fix="pip uninstall overlap, until none is left")
