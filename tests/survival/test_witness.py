"""The witness of a job: its files are what they say from their first moment."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from overlap.errors import UsageError
from overlap.kernel_facts import process_identity
from overlap.survival import witness as module
from overlap.survival.agreement import AgreementState, EpochWorld
from overlap.survival.epochs import SurvivingRun
from overlap.survival.witness import Witness, WitnessError, WitnessReport
from tests.threads import run_threads


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.001)


WORLD = EpochWorld(epoch=0, members=(0, 1), step=0)


def test_the_kernel_shows_the_end_of_a_process_of_this_host(tmp_path, monkeypatch):
    one = Witness(tmp_path, 0, 0, 0, WORLD)
    assert not one.has_ended(1)  # it has not come yet
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = process_identity(process.pid)
        monkeypatch.setattr(module, "process_identity", lambda: identity)
        Witness(tmp_path, 0, 0, 1, WORLD)
        assert not one.is_dead(1)
        process.send_signal(signal.SIGSTOP)
        assert not one.is_dead(1)
        process.kill()
    assert one.is_dead(1)
    assert one.has_ended(1)


async def test_the_kernel_shows_the_end_of_a_process_whose_child_has_its_socket(tmp_path, monkeypatch):
    one = shared(tmp_path, 0)
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220 (it starts at once)
        identity = process_identity(process.pid)
        monkeypatch.setattr(module, "process_identity", lambda: identity)
        other = shared(tmp_path, 1)  # it stays open
        async with one.watching_members([0, 1]):
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not one.is_dead(1)
            process.kill()
            process.wait()
            assert one.has_ended(1)
    one.close()
    other.close()


def test_a_file_is_its_writers_though_the_answer_to_the_link_was_lost(tmp_path, monkeypatch):
    witness = Witness(tmp_path, 0, 0, 1, WORLD)
    link = os.link

    def answered_late(source, target):
        link(source, target)
        link(source, target)  # as a client of NFS that repeats its request

    monkeypatch.setattr(os, "link", answered_late)
    assert witness.record_proposal(EpochWorld(epoch=1, members=(1,), step=0))
    monkeypatch.undo()
    assert not witness._create_file("epoch-1", {})


def test_many_members_report_at_once_without_waiting_for_each_other(tmp_path):
    """Each writes its file in as many calls as one alone, under names that no other member uses; no lock."""
    world, touched = EpochWorld(epoch=0, members=tuple(range(64)), step=0), []
    witnesses = [Witness(tmp_path, 0, 0, member, world) for member in world.members]

    def listen(event, arguments):
        if is_heard and any(str(tmp_path) in str(argument) for argument in arguments):
            touched.append((event, threading.get_ident()))

    def report(member):
        meeting.wait()
        witnesses[member].write_report(0, WitnessReport(step=member, endpoint=("h", 1)))

    is_heard, meeting = True, threading.Barrier(64)
    sys.addaudithook(listen)
    run_threads(threading.Thread(target=report, args=(member,)) for member in world.members)
    is_heard = False
    assert {member: report.step for member, report in witnesses[0].read_reports(0, world.members).items()} == dict(
        enumerate(world.members)
    )
    events = Counter(event for event, _ in touched)
    assert events == {"open": 64, "os.link": 64, "os.remove": 64}
    assert len({thread for _, thread in touched}) == 64


async def test_a_full_memory_is_reported_with_its_folder(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "witness"
    line = re.escape(f"survive: cannot write the witness {folder}: No space left on device; make room in {tmp_path}")
    enter = partial(module.Witness, folder, 0, 0, 1, WORLD)
    witness = enter()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=f"^{line}$"):
        await witness.access_folder(lambda: witness.record_finished_epoch(0))
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(UsageError, match=f"^{line}$"):
        enter()


def shared(folder, member, *, limit_s=5.0):
    return Witness(folder, 0, 0, member, WORLD, address="127.0.0.1", limit_s=limit_s)


async def test_the_socket_of_a_process_shows_its_end(tmp_path):
    one, other = shared(tmp_path, 0), shared(tmp_path, 1)
    async with one.watching_members([0, 1]):
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not one.is_dead(1)
        other.close()
        await until(lambda: one.has_ended(1))
    async with one.watching_members([0, 1]):
        await until(lambda: one.has_ended(1))
    one.close()


async def test_a_host_that_gives_no_answer_is_dead_and_may_live(tmp_path, monkeypatch):
    one, other = shared(tmp_path, 0), shared(tmp_path, 1)

    async def cut(endpoint):
        raise OSError("no route to host")

    monkeypatch.setattr(module, "dial", cut)
    async with one.watching_members([0, 1]):
        await until(lambda: one.is_dead(1))
    assert not one.has_ended(1)
    one.close()
    other.close()


async def test_a_member_is_unreached_until_it_answers(tmp_path, monkeypatch):
    one, other, answers = shared(tmp_path, 0), shared(tmp_path, 1), trio.Event()

    async def cut(endpoint):
        await answers.wait()
        raise OSError("no route to host")

    with monkeypatch.context() as patched:
        patched.setattr(module, "dial", cut)
        async with one.watching_members([0, 1]):
            await until(one.is_awaiting_answers)
            assert one.unreached_members() == ()
            answers.set()
            await until(lambda: not one.is_awaiting_answers())
    assert one.unreached_members() == (1,)
    one.write_report(3, WitnessReport(step=0, endpoint=("here", 1), unreached=one.unreached_members()))
    assert other.read_reports(3, [0, 1])[0].unreached == (1,)
    async with one.watching_members([0, 1]):
        await until(lambda: one.unreached_members() == ())
        assert not one.is_dead(1)
    one.close()
    other.close()


async def test_joining_ends_once_it_is_known_who_can_be_dialled(monkeypatch):
    looks, dials = [], [True, True, False]
    witness = SimpleNamespace(look_s=0.001, watching_members=lambda members: nullcontext())
    witness.is_awaiting_answers = lambda: dials.pop(0)
    witness._socket, witness._members = None, Path("attempt-0")
    witness.access_folder = partial(Witness.access_folder, witness)
    run = SimpleNamespace(
        state=AgreementState.JOINS, witness=witness, world=EpochWorld(epoch=1, members=(0, 1), step=0),
        _has_fallen_apart=lambda: looks.append(len(dials)) or True,
    )  # fmt: skip
    with trio.CancelScope() as joining:
        await SurvivingRun._watch_joining(run, joining)
        await trio.sleep_forever()
    assert (looks, dials) == ([3], [])


async def test_a_folder_that_blocks_ends_the_process(tmp_path):
    witness, free = shared(tmp_path, 0, limit_s=0.2), threading.Event()
    error = r"process 0 cannot reach the witness in .*: it does not answer; this process ends"
    with pytest.raises(WitnessError, match=error):
        await witness.access_folder(free.wait)
    free.set()
    witness.close()


async def test_a_process_that_was_stopped_in_a_call_makes_it_again(tmp_path):
    """When it goes on the limit of the call is over."""
    witness, free, calls = shared(tmp_path, 0, limit_s=0.2), threading.Event(), []

    def look():
        calls.append(None)
        if len(calls) == 1:
            free.wait()
        return witness.read_newest_world()

    assert await witness.access_folder(look) == WORLD
    free.set()
    witness.close()


async def test_a_call_that_fails_for_a_moment_is_made_again(tmp_path):
    witness, failures = shared(tmp_path, 0), [OSError("stale")]

    def look():
        if failures:
            raise failures.pop()
        return witness.read_newest_world()

    assert await witness.access_folder(look) == WORLD
    witness.close()


async def test_a_slow_folder_is_reported_and_is_not_a_lost_one(tmp_path, monkeypatch, capsys):
    """Each operation takes half of the limit of an access; together they take four times the limit."""
    witness = shared(tmp_path, 0, limit_s=0.2)
    monkeypatch.setattr(module, "_SLOW_S", 0.05)

    def slow(function):
        def run(*args, **options):
            time.sleep(0.1)
            return function(*args, **options)

        return run

    for name in ("touch", "write_text", "stat"):
        monkeypatch.setattr(Path, name, slow(getattr(Path, name)))
    for name in ("link", "scandir"):
        monkeypatch.setattr(os, name, slow(getattr(os, name)))
    report = WitnessReport(step=3, endpoint=("here", 1))
    await witness.access_folder(lambda: witness.write_report(0, report))
    assert await witness.access_folder(lambda: witness.read_reports(0, [0, 1])) == {0: report}
    line = f"overlap: process 0: the witness in {tmp_path} is slow, "
    assert [told.startswith(line) for told in capsys.readouterr().err.splitlines()] == [True]
    witness.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
async def test_a_folder_of_several_hosts_that_cannot_be_written_ends_the_process(tmp_path, monkeypatch, number):
    witness = shared(tmp_path, 0, limit_s=0.3)

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(
        WitnessError, match=f"^process 0 cannot reach the witness in {tmp_path}: {os.strerror(number)}; "
    ):
        await witness.access_folder(lambda: witness.record_finished_epoch(0))
    witness.close()
