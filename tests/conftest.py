"""How every test runs: what is slow, what may be skipped, with which signals, and that nothing is left behind."""

import faulthandler
import gc
import inspect
import math
import os
import re
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from zlib import crc32

import pytest
import trio
from hypothesis import HealthCheck, settings
from trio.testing import MockClock

# An installation has it among its entry points; a checkout that was installed before it came has not.
pytest_plugins = ["pytest_overlap"]

# -- properties --------------------------------------------------------------------------------------------------

# How long an example takes, or is in the making, says how busy the computer is, and nothing about what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
_PATIENT = settings.get_profile("patient")
settings.register_profile("everyday", _PATIENT, derandomize=True, max_examples=10)  # the same cases in each run
settings.register_profile("thorough", _PATIENT, derandomize=True)
settings.register_profile("fresh", _PATIENT, print_blob=True)  # others in each run; --hypothesis-seed repeats them
settings.load_profile("everyday")

# -- what is slow ------------------------------------------------------------------------------------------------

# Of a test with many cases, every day: two show a mistake in the test's own path, the others widen it. Of losses of
# processes there are three: which process it is, and when, makes other paths.
FEW = 2
FEW_LOSSES = 3
_OF_LOSSES = ("launch", "faults", "embedded", "efa", "engines")  # folders
_MINUTES = ("faults", "kills", "soak", "torch", "engines")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test but a few; deselect tests of minutes whose marker `-m` does not name."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, ("slow", *_MINUTES))):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        told = cases[0].get_closest_marker("everyday")
        usual = FEW_LOSSES if cases[0].path.parent.name in _OF_LOSSES else FEW
        for case in set(cases) - few(cases, told.args[0] if told else usual):
            case.add_marker("slow")
    asked = set(re.findall(r"\w+", config.option.markexpr))
    if asked and (unasked := [name for name in _MINUTES if name not in asked]):
        long = {item for item in items if any(map(item.get_closest_marker, unasked))}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]


def few(cases: Sequence[pytest.Function], count: int) -> set[pytest.Function]:
    """Choose so many cases in which many values of parameters occur: the same ones in whatever order they come."""
    if len(cases) <= count:
        return set(cases)
    values = {case: set(enumerate(case.callspec.id.split("-"))) for case in cases}
    # By a sum of the name: in the order of the names, ties would go to those that begin alike.
    left = sorted(cases, key=lambda case: (crc32(case.nodeid.encode()), case.nodeid))
    kept: set[pytest.Function] = set()
    met: set[tuple[int, str]] = set()
    for _ in range(count):
        best = max(left, key=lambda case: len(values[case] - met))
        left.remove(best)
        kept.add(best)
        met |= values[best]
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: all of them live to the end, and it takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what lives to the end: all these tests and what they import."""
    gc.collect()
    gc.freeze()


# -- tests that are async functions ------------------------------------------------------------------------------

_HANGS_S = 60.0  # far above what such a test takes on a busy machine: it bounds a hang and decides nothing else


@pytest.fixture
def autojump_clock() -> MockClock:
    """Return the clock of an async test whose waiting takes no time."""
    return MockClock(autojump_threshold=0)


@pytest.fixture(params=["real", "virtual"])
def clock(request: pytest.FixtureRequest) -> str:
    """Return the name of a clock; a test that takes it runs on each of both."""
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is an async function under Trio: for a minute at most, or on the clock that a fixture gives."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("ranks"):
        return None
    clock = next((value for value in pyfuncitem.funcargs.values() if isinstance(value, trio.abc.Clock)), None)
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded() -> None:
        with trio.fail_after(_HANGS_S if clock is None else math.inf):
            await pyfuncitem.obj(**arguments)

    trio.run(bounded, clock=clock)
    return True


# -- what may be skipped -----------------------------------------------------------------------------------------

# True on machines of users, CI's among them. Whatever else is skipped there, `--no-unexpected-skips` makes a failure.
EXPECTED_SKIPS = (
    "torch is not installed",  # 200 MB
    "only what torch does with numpy's memory is tested here",
    "whoever has tensors has torch",
    "no rights to make a network namespace",
    "ip of iproute2 is not installed",
    "tc of iproute2 is not installed",
    "no emulated hosts: ",
    "not installed: ",
    "needs memory for a GiB at both ends",
    "needs Linux on x86-64",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of CI."""
    parser.addoption("--no-unexpected-skips", action="store_true", help="fail if a test is skipped that should not be")


def pytest_configure(config: pytest.Config) -> None:
    """Be as a user's shell; keep bytecode; and in the process that tells the result, watch what is skipped."""
    # Without buffers, processes that share an output write lines and their ends one by one, in any order.
    os.environ.pop("PYTHONUNBUFFERED", None)
    _keep_bytecode(config)
    if config.getoption("--no-unexpected-skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Skips())


class _Skips:
    def __init__(self) -> None:
        self._unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that skips itself runs no test that could tell."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(EXPECTED_SKIPS):
                self._unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._unexpected:
            terminalreporter.write_line(f"should not be skipped: {line}", red=True)


# -- signals -----------------------------------------------------------------------------------------------------

_SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
}


@pytest.fixture(autouse=True, scope="session")
def _signals_act_as_in_a_terminal() -> Iterator[None]:
    """Who starts pytest in the background, or under nohup, lets it ignore signals, and all that tests start."""
    before = {number: signal.signal(number, handler) for number, handler in _SIGNALS.items()}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


# -- what starting a process costs -------------------------------------------------------------------------------


def _keep_bytecode(config: pytest.Config) -> None:
    """Where Python may not write bytecode beside the sources, keep it in pytest's cache: of tests and of processes.

    Each worker would rewrite the assertions of all tests, for half of the time that it needs to collect them, and each
    of some hundred processes that tests start would compile all that it imports.
    """
    cache = getattr(config, "cache", None)  # none with `-p no:cacheprovider`
    if sys.dont_write_bytecode and cache is not None:
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# -- how long a test may take ------------------------------------------------------------------------------------

_LONGEST_S = 3600


@pytest.fixture(autouse=True)
def _what_is_long_by_nature_has_an_hour(request: pytest.FixtureRequest) -> None:
    """Put off the limit of one test, `faulthandler_timeout`, for those that go on for minutes."""
    if any(request.node.get_closest_marker(name) for name in ("engines", "kills", "soak")):
        faulthandler.dump_traceback_later(_LONGEST_S, exit=True, file=sys.__stderr__)


# -- what a process remembers ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_secret_is_remembered() -> Iterator[None]:
    """A process takes OVERLAP_SECRET out of its environment, and keeps it for its next worlds: here for other tests."""
    yield
    if module := sys.modules.get("overlap.processes.secret"):
        module._removed.clear()


_MANY_PLANS = 32  # of a machine of 256 ranks a collective's candidates take 40 MB


@pytest.fixture(autouse=True, scope="module")
def _plans_are_forgotten() -> Iterator[None]:
    """Drop the candidates of plans after a file that has made many: a worker with those of all files takes 8 GB."""
    yield
    modules = [sys.modules.get(f"overlap.cost.{name}") for name in ("candidates", "select")]
    caches = [
        getattr(module, name) for module, name in zip(modules, ("list_options", "_cached_plan"), strict=True) if module
    ]
    if any(cache.cache_info().currsize > _MANY_PLANS for cache in caches):
        for cache in caches:
            cache.cache_clear()


# -- what is left ------------------------------------------------------------------------------------------------

_DESCRIPTORS = "/proc/self/fd"
_HAS_DESCRIPTORS = os.path.isdir(_DESCRIPTORS)
# Trio keeps idle worker threads for ten seconds, to use them again.
_CACHED = "Trio thread"


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(_CACHED)}


def _sockets() -> set[str]:
    """Return the open sockets of this process, where the system tells."""
    found = set()
    for descriptor in os.listdir(_DESCRIPTORS) if _HAS_DESCRIPTORS else ():
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
        except OSError:  # the one that listdir itself held open
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a socket behind."""
    threads, sockets = _threads(), _sockets()
    yield
    until = time.monotonic() + 1.0
    while _threads() - threads and time.monotonic() < until:  # one that has done its work may not have ended
        time.sleep(0.001)
    left = sorted(thread.name for thread in _threads() - threads)
    assert not left, f"threads left behind: {', '.join(left)}"
    opened = len(_sockets() - sockets)
    assert not opened, f"{opened} sockets left open"
