"""Dialling of process 0, or of the launcher of node 0, in as many attempts as it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection

import trio

from transports.handshake import HandshakeError, Why, greet
from transports.identity import Hello

from .identity import Joiner, JoinError
from .sockets import OUTAGE_S, dial, format_endpoint

#: Longest time of a connection attempt: an endpoint whose packets are lost never refuses.
_DIAL_LIMIT_S = 5.0
#: First and longest pause between two attempts.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


class Dialler:
    """Attempts of a process to connect to the endpoint of its world and to shake hands: processes start in any order.

    Args:
        joiner: The process, or launcher.
        hello: Its introduction.
        name: Name of the listener, for errors.
        outage_s: The connection breaks if its host answers nothing for this long.
        retried: Failures of a handshake after which another attempt may succeed.

    Attributes:
        listener: Name and endpoint of the listener.
        obstacle: Why the last attempt failed.
    """

    def __init__(
        self,
        joiner: Joiner,
        hello: Hello,
        name: str,
        *,
        outage_s: float = OUTAGE_S,
        retried: Collection[Why] = ("left", "silent"),
    ) -> None:
        self._name, self._endpoint = name, format_endpoint(joiner.endpoint)
        self.listener: str = f"{name} at {self._endpoint}"
        self.obstacle: str = "no attempt came to an end"
        self._joiner, self._hello, self._outage_s, self._retried = joiner, hello, outage_s, retried

    async def reach(self, obstacle: Callable[[Hello], str] = lambda hello: "") -> trio.abc.Stream:
        """Return a connection on which both sides have shaken hands.

        Args:
            obstacle: Returns why another attempt is needed, given the listener's hello; empty if none is.

        Raises:
            JoinError: The listener has refused this process.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                stream, hello = await self._connect()
                self.obstacle = obstacle(hello)
                if not self.obstacle:
                    return stream
                await trio.aclose_forcefully(stream)
            except HandshakeError as error:
                self.obstacle = str(error)
                if error.why not in self._retried:
                    raise JoinError(f"{self.listener}: {error}") from error
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def too_late(self, within_s: float) -> JoinError:
        """Return the error of a timeout."""
        within = f"at {self._endpoint} within {within_s:g} s"
        return JoinError(f"{self._name} could not be reached {within}: {self.obstacle}", missing=[0])

    async def _connect(self) -> tuple[trio.abc.Stream, Hello]:
        joiner = self._joiner
        try:
            with trio.fail_after(_DIAL_LIMIT_S):
                connection = await dial(joiner.endpoint, self._outage_s)
        except (OSError, trio.TooSlowError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it does not answer"
            raise HandshakeError(reason, why="silent") from error
        stream = connection if joiner.tls is None else joiner.tls.wrap(connection, serving=False)
        try:
            return stream, await greet(stream, self._hello, joiner.secret)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
