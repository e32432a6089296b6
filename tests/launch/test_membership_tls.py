"""Worlds whose connections are encrypted: who has no certificate of theirs does not get in."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio

from overlap.processes.identity import JoinError
from overlap.processes.join import Membership, join_here
from transports import ArgumentError
from transports.tls import Tls

from .company import UNSHAKEN, MakeCompany, wait_and_leave

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes certificates with the openssl command"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Two authorities, each with a certificate that it has signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    usage = ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 and later take no others, RFC 5280, 4.2.1
    (folder / "signed").write_text("subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")
    for name in ("ours", "theirs"):
        new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        itself = ["-x509", "-days", "30", "-subj", f"/CN={name}", *usage]
        openssl(*new, *itself, "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem")
        openssl(*new, "-subj", "/CN=member", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ["-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-extfile", "signed"]
        openssl("x509", "-req", "-days", "30", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return {
        name: Tls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / f"{name}-ca.pem")
        for name in ("ours", "theirs")
    }


@needs_openssl
async def test_a_world_over_tls(certificates: dict[str, Tls], make_company: MakeCompany) -> None:
    tls = certificates["ours"]
    results: list[list[bytes]] = []

    async def talk(membership: Membership) -> None:
        results.append(await membership.exchange("x", bytes([membership.member])))
        await membership.leave()

    company = make_company(3)
    async with trio.open_nursery() as nursery:
        for member in range(3):
            nursery.start_soon(partial(company.attend, member, talk, tls=tls))
    assert company.lines == []
    assert results.count([b"\x00", b"\x01", b"\x02"]) == 3


PLAIN = ": the other side hung up without a word; it is another program, or wants TLS, which this side does not speak"
NOT_ACCEPTED = (
    ": the other side hung up without a word once TLS was set up; it probably does not accept this side's certificate: "
    "all processes need certificates of one authority"
)


@needs_openssl
async def test_whoever_has_no_certificate_of_ours_does_not_get_in(
    certificates: dict[str, Tls], make_company: MakeCompany
) -> None:
    ours = certificates["ours"]
    company = make_company(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(company.attend, 0, wait_and_leave, tls=ours))
        need = r"TLS failed \(.+\); all processes need certificates of one authority, or none has any$"
        with pytest.raises(JoinError, match=need):
            await company.attend(1, wait_and_leave, tls=certificates["theirs"])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as trying:
                trying.start_soon(partial(company.attend, 1, wait_and_leave, progress_s=0.05))
                await company.lines.until("waits for process 0")
                await company.lines.until("TLS failed")
                await company.lines.until(PLAIN)
                scope.cancel()
        mixed = replace(certificates["theirs"], authority=ours.authority)  # it trusts us, and we do not trust it
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as trying:
                trying.start_soon(partial(company.attend, 1, wait_and_leave, progress_s=0.05, tls=mixed))
                await company.lines.until(NOT_ACCEPTED)
                scope.cancel()
        nursery.start_soon(partial(company.attend, 1, wait_and_leave, tls=ours))


@needs_openssl
async def test_wrong_tls_files_are_known_before_anybody_connects(
    certificates: dict[str, Tls], tmp_path: Path, make_company: MakeCompany
) -> None:
    ours, theirs = certificates["ours"], certificates["theirs"]
    missing = Tls(certificate=ours.certificate, key=tmp_path / "none.key", authority=ours.authority)
    mixed = Tls(certificate=ours.certificate, key=theirs.key, authority=ours.authority)
    garbage = Tls(certificate=__file__, key=ours.key, authority=ours.authority)
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(ours.key), "-aes256", "-passout", "pass:x", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)  # noqa: ASYNC221 (nothing else runs)
    locked = Tls(certificate=ours.certificate, key=encrypted, authority=ours.authority)
    company = make_company(1)
    for tls, message in (
        (missing, r"no file .*none\.key; "),
        (mixed, "KEY_VALUES_MISMATCH"),
        (garbage, "PEM"),
        (locked, "encrypted"),
    ):
        with pytest.raises(ArgumentError, match=rf"^TLS: .*{message}"):
            async with join_here(company.config(0, tls=tls, patience=UNSHAKEN), report=print):
                raise AssertionError("it began")
