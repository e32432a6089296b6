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
        scale: How hard to try.
        only: Names of the checks to run; all by default.

    Raises:
        ContractViolation: Naming the first check that failed.
        ArgumentError: ``scale`` is no `Scale`, or ``make_pair`` does not open two wires.
        KeyError: ``only`` names an unknown check.
    """
    for name in CHECKS if only is None else only:
        await run_check(name, make_pair, scale=Scale() if scale is None else scale)


async def run_check(name: str, make_pair: MakePair, *, scale: Scale) -> None:
    """Run one check on a fresh pair.

    Raises:
        ContractViolation: It failed, hung, or ended with an error that is no part of the contract.
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
        cause: BaseException = failure
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        late = isinstance(cause, trio.TooSlowError)  # its context are all tasks that were cancelled
        raise ContractViolation(name, _describe_failure(cause, check, scale)) from None if late else cause


class _NoPair(Exception):
    """A result of `make_pair` that is no pair of endpoints; not an error of the transport under test."""


def _call_make_pair(make_pair: MakePair) -> AbstractAsyncContextManager[tuple[Wire, Wire]]:
    """Call `make_pair`; `ArgumentError` unless it returns an asynchronous context manager."""
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
    """Return the two wires of an opened pair; `_NoPair` if there are none."""
    if isinstance(ends, tuple | list) and len(ends) == 2 and all(isinstance(end, Wire) for end in ends):
        return ends[0], ends[1]
    raise _NoPair(f"make_pair: expected it to open two wires, as of transport.wire(rank), got {ends!r}")


def _describe_failure(cause: BaseException, check: Rule, scale: Scale) -> str:
    """Return the text of a failed check: the broken promise, or the error and the promise of the check."""
    if isinstance(cause, BrokenPromise):
        return str(cause)
    late = isinstance(cause, trio.TooSlowError)
    seen = f"still waiting after {scale.timeout_s:g} s" if late else f"{type(cause).__name__}: {cause}"
    promise = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
    return f"{seen}; the promise: {promise}"


#: Every check by name, in the order in which `check_transport` runs them.
CHECKS: Mapping[str, Rule] = MappingProxyType({rule.__name__: rule for rule in RULES})
