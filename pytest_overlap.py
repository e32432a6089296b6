"""Plugin of pytest: the marker and the fixture `ranks`, for tests with many ranks in one process.

A module beside the packages, because pytest loads it in every run: importing `overlap` takes longer than a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from overlap.testing import Ranks

_MARKER = (
    'ranks(n, cluster="local", clock="virtual", seed=0, seeds=1, faults=..., steps=...): run this async function on '
    "each of n ranks of overlap, given `rank`; see docs/testing.md"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """The rank of an async test that is marked with `ranks`."""
    _check_runs_on_ranks(request)
    return None  # each rank is given its own


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> Any:
    """How many steps an async test takes, as its mark `ranks(..., steps=...)` says."""
    _check_runs_on_ranks(request)
    return None  # the mark gives it


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Runs programs and functions with many ranks in this process; `@pytest.mark.ranks(...)` sets its defaults.

    A test that passes, but has not looked at an answer that is no, such as that of `run.same`, fails at its end.
    """
    from overlap.testing import Answer, Ranks

    marker, failed = request.node.get_closest_marker("ranks"), request.session.testsfailed
    with Answer.unasked() as answers:
        yield Ranks(request.path.parent, **({} if marker is None else _marker_settings(marker)))
    if answers and request.session.testsfailed == failed:
        told = "\n".join(f"an answer is no, and the test does not assert it: {each.why}" for each in answers)
        pytest.fail(f'{told}\nwrite `assert` before the question, as in `assert run.same("results")`', pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test function that is marked with `ranks` on every rank."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from overlap.errors import UsageError
    from overlap.testing import RanksFailed, run_marked

    names = pyfuncitem._fixtureinfo.argnames
    fixtures = {name: pyfuncitem.funcargs[name] for name in names if name != "rank"}
    wrong = ""
    try:
        run_marked(pyfuncitem.obj, fixtures, _marker_settings(marker), takes_rank="rank" in names)
    except (RanksFailed, UsageError) as error:
        wrong = str(error)
    if wrong:
        pytest.fail(wrong, pytrace=False)
    return True


def _check_runs_on_ranks(request: pytest.FixtureRequest) -> None:
    """Fail a test that asks for what only the ranks of an async test are given."""
    name, test = request.fixturename, request.function
    what = f"{name}: expected an async function with the mark `@pytest.mark.ranks(n)`, but {test.__name__} "
    if not inspect.iscoroutinefunction(test):
        advice = f"write `async def {test.__name__}({name})`, or take `ranks` and call `ranks.run(main, ranks=n)`"
        pytest.fail(f"{what}is a plain function; {advice}", pytrace=False)
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"{what}has no mark", pytrace=False)


def _marker_settings(marker: pytest.Mark) -> dict[str, Any]:
    if len(marker.args) > 1:
        pytest.fail(f"ranks: expected one number of ranks, got {marker.args}", pytrace=False)
    return {**({"ranks": marker.args[0]} if marker.args else {}), **marker.kwargs}
