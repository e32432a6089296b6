"""The contract suite: proves the promises of `transports.Wire` on any transport. Needs no pytest.

    async def main() -> None:
        @asynccontextmanager
        async def make_pair():
            async with MyTransport(...).open() as transport:
                yield transport.wire(0), transport.wire(1)

        await check_transport(make_pair)

    trio.run(main)

Each check gets a fresh pair and has a name, so that `CHECKS` can also be run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import TypeAlias

import trio

from transports._checking import BrokenPromise, Rule, Scale, WirePair
from transports._rules import RULES
from transports.failures import ArgumentError
from transports.wire import Wire

MakePair: TypeAlias = Callable[[], AbstractAsyncContextManager[tuple[Wire, Wire]]]


class ContractViolation(AssertionError):
    """A transport broke a promise.

    Args:
        check: Name of the check that saw it, a key of `CHECKS`.
        reason: The promise, and the fact against it.

    Attributes:
        check: Name of the check that saw it, a key of `CHECKS`.
        reason: The promise, and the fact against it.
    """

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(f"{check}: {reason}")
        self.check = check
        self.reason = reason


async def check_transport(
    make_pair: MakePair, *, scale: Scale | None = None, only: Iterable[str] | None = None
) -> None:
    """Run the checks, each on a fresh pair.

    Args:
        make_pair: Opens two connected wires of different ranks for the length of an ``async with``.
        scale: Numbers and lengths of messages, and time limits.
        only: Names of the checks to run; all by default.

    Raises:
        ContractViolation: A check failed; the error names the check. Later checks are not run.
        ArgumentError: ``scale`` is no `Scale`, or ``make_pair`` does not open two wires.
        KeyError: ``only`` names an unknown check.
    """
    for name in CHECKS if only is None else only:
        await run_check(name, make_pair, scale=Scale() if scale is None else scale)


async def run_check(name: str, make_pair: MakePair, *, scale: Scale) -> None:
    """Run one check on a fresh pair.

    Args:
        name: A key of `CHECKS`.
        make_pair: As of `check_transport`.
        scale: Numbers and lengths of messages, and time limits.

    Raises:
        ContractViolation: The check failed, hung, or ended with an error that is no part of the contract.
        ArgumentError: ``scale`` is no `Scale`, or ``make_pair`` does not open two wires.
        KeyError: There is no check of this name.
    """
    if not isinstance(scale, Scale):
        raise ArgumentError(f"scale: expected a Scale, such as transports.testing.Scale(tags=100), got {scale!r}")
    check, pair = CHECKS[name], _call_make_pair(make_pair)
    failure: Exception | None = None
    try:
        async with pair as ends:
            try:
                a, b = _check_endpoints(ends)
                with trio.fail_after(scale.timeout_s):
                    async with trio.open_nursery() as nursery:
                        await check(WirePair(a, b, scale, nursery))
            except Exception as error:  # raised once the pair is closed: its nurseries would wrap it in groups
                failure = error
    except Exception as error:
        failure = failure or error
    if isinstance(failure, _NoPair):
        raise ArgumentError(str(failure))
    if failure is not None:
        cause = _find_root_cause(failure)
        # the context of a `TooSlowError` would print every task that was cancelled
        late = isinstance(cause, trio.TooSlowError)
        raise ContractViolation(name, _describe_failure(name, cause, check, scale)) from None if late else cause


def _find_root_cause(failure: BaseException) -> BaseException:
    """Return the error itself; of a group, the first error within it, through all nested groups."""
    return _find_root_cause(failure.exceptions[0]) if isinstance(failure, BaseExceptionGroup) else failure


class _NoPair(Exception):
    """`make_pair` did not open two wires: an error of the caller, not of the transport under test."""


def _call_make_pair(make_pair: MakePair) -> AbstractAsyncContextManager[tuple[Wire, Wire]]:
    """Raise `ArgumentError` unless `make_pair` returns an asynchronous context manager."""
    expected = "make_pair: expected a function that returns an asynchronous context manager of two wires"
    if not callable(make_pair):
        raise ArgumentError(f"{expected}, got {make_pair!r}")
    pair: object = make_pair()
    if not isinstance(pair, AbstractAsyncContextManager):
        if isinstance(pair, Coroutine):
            pair.close()  # it is not awaited
        raise ArgumentError(f"{expected} (@asynccontextmanager makes one), and it returns {pair!r}")
    return pair


def _check_endpoints(ends: object) -> tuple[Wire, Wire]:
    """Return the two wires that `make_pair` has opened; raise `_NoPair` if it opened anything else."""
    if isinstance(ends, tuple | list) and len(ends) == 2 and all(isinstance(end, Wire) for end in ends):
        return ends[0], ends[1]
    raise _NoPair(f"make_pair: expected it to open two wires, as of transport.wire(rank), got {ends!r}")


def _describe_failure(name: str, cause: BaseException, check: Rule, scale: Scale) -> str:
    """Return what failed, how to run the check alone, and the promise: the first paragraph of the check's docstring.

    The text of a `BrokenPromise` already has the promise.
    """
    again = f"run it alone: check_transport(make_pair, only=[{name!r}])"
    if isinstance(cause, BrokenPromise):
        return f"{cause}; {again}"
    late = isinstance(cause, trio.TooSlowError)
    limit = f"{scale.timeout_s:g} s (Scale.timeout_s)"
    seen = f"still waiting after {limit}" if late else f"{type(cause).__name__}: {cause}"
    promise = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
    return f"{seen}; {again}; the promise: {promise}"


#: Every check by name, in the order in which `check_transport` runs them.
CHECKS: Mapping[str, Rule] = MappingProxyType({rule.__name__: rule for rule in RULES})
