"""Two emulated hosts, for tests that are skipped where this machine does not allow them."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.benchmarks.two_hosts.network import Host, HostsUnavailableError, two_hosts


@contextmanager
def emulated_hosts(**settings: Any) -> Iterator[tuple[Host, Host]]:
    """Join two hosts as `two_hosts` does; skip the test where tools or rights are missing."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts(**settings))
        except HostsUnavailableError as error:
            if not re.search("is not installed|no rights to make", str(error)):
                raise
            pytest.skip(f"no emulated hosts: {error}")
        yield hosts
