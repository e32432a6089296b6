"""Optional TLS for connections between processes: its files, and the checks made with them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from transports.failures import ArgumentError

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for mutual TLS: both sides show theirs, both check the other's against one authority.

    Host names are not checked, because processes move between machines: any certificate of the authority admits a
    process. So give each job an authority that signs for no other job.
    """

    certificate: str | PathLike[str]  # PEM file with this process's certificate, and the chain up to the authority
    key: str | PathLike[str]  # PEM file with its private key, not encrypted
    authority: str | PathLike[str]  # PEM file with the certificate of the authority that signed those of all processes

    def check(self) -> None:
        """Read the files, so that a wrong one is found before the first connection.

        Raises:
            ArgumentError: A file is missing or wrong; the message names the files.
        """
        self._make_context(serving=True)
        self._make_context(serving=False)

    def wrap(self, stream: trio.abc.Stream, *, serving: bool) -> trio.SSLStream[trio.abc.Stream]:
        """Return an encrypted stream over a connection that has carried no bytes yet.

        The TLS handshake takes place at the first use of the stream. Its errors are `trio.BrokenResourceError`.

        Args:
            stream: The connection; the result owns it.
            serving: Whether this side has accepted the connection.

        Raises:
            ArgumentError: As in `check`.
        """
        return trio.SSLStream(stream, self._make_context(serving=serving), server_side=serving)

    def _make_context(self, *, serving: bool) -> ssl.SSLContext:
        """Read the files, and return a context for TLS 1.3 that requires a certificate of the other side."""
        for field, path in (("certificate", self.certificate), ("key", self.key), ("authority", self.authority)):
            if not Path(path).is_file():
                raise ArgumentError(f"TLS: {field}: there is no file {path}; name one that exists")
        purpose = ssl.Purpose.CLIENT_AUTH if serving else ssl.Purpose.SERVER_AUTH
        try:
            context = ssl.create_default_context(purpose, cafile=self.authority)
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            files = f"certificate {self.certificate}, key {self.key}, authority {self.authority}"
            advice = "name files that belong together, and a key without a password"
            raise ArgumentError(f"TLS: {files}: {error}; {advice}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def _no_password() -> str:
    """Raise `ValueError`: `ssl` asks for a password only if the key is encrypted."""
    raise ValueError("the key is encrypted")
