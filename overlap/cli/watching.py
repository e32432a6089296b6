"""How `overlap top` and `overlap ls` find a job elsewhere, and prove that they may look at it."""

from __future__ import annotations

import argparse
import os

from transports.tls import Tls

from ..config import RunConfig
from ..errors import UsageError
from ..processes.launchers import is_loopback
from ..processes.secret import given_secret, user_secret
from ..processes.sockets import Endpoint, format_endpoint, parse_endpoint
from ..processes.watching import WatchedWorld


def add_secret_file(parser: argparse.ArgumentParser) -> None:
    """Add the option with which both commands are told the secret."""
    parser.add_argument(
        "--secret-file", metavar="FILE", help="the job's secret, in a file that only you can read; for HOST:PORT"
    )


def endpoint_of(named: str | None) -> Endpoint | None:
    """Return where a job listens that is meant, or None: one here is.

    Raises:
        UsageError: It looks like an endpoint, and is none.
    """
    if named is not None:
        return parse_endpoint(named) if ":" in named else None
    told = os.environ.get("OVERLAP_RDZV_ENDPOINT")
    return parse_endpoint(told) if told else None


def watched(endpoint: Endpoint, secret_file: str | None) -> WatchedWorld:
    """Return the world that listens there.

    Raises:
        UsageError: There is none, or no secret.
    """
    environ = os.environ if secret_file is None else {"OVERLAP_SECRET_FILE": secret_file}
    try:
        secret = given_secret(environ)
    except UsageError as error:
        raise UsageError(str(error).replace("OVERLAP_SECRET_FILE: ", "--secret-file: ", 1)) from None
    if secret is None and not is_loopback(endpoint[0]):
        where = format_endpoint(endpoint)
        raise UsageError(f"{where}: say the secret of the job: --secret-file, OVERLAP_SECRET_FILE or OVERLAP_SECRET")
    tls = RunConfig.from_environment(os.environ).tls_files()
    files = Tls(certificate=tls[0], key=tls[1], authority=tls[2]) if tls else None
    return WatchedWorld(endpoint, secret=secret or user_secret(), tls=files)
