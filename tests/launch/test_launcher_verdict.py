import os
from dataclasses import replace
from threading import Thread

import pytest

from overlap.cli.processes import _report_end
from overlap.config import RunConfig
from overlap.errors import PeerFailedError, RankFailedError, StallError
from overlap.kernel_facts import count_oom_kills
from overlap.launch.jobs import Job
from overlap.launch.launcher import LaunchOutcome
from overlap.launch.verdict import culprit_report, find_culprit, launch_exit_code
from overlap.processes.status import (
    LONGEST_BYTES,
    LONGEST_TEXT,
    Entering,
    Leaving,
    MemberLost,
    Status,
    parse_record,
    report_to_launcher,
    status_from_error,
)
from tests.threads import running
from transports import LinkLostError

GUILTY = Status(cause=True, line="bad", text="Traceback\nValueError: bad\n")
STOPPED = "; the other 7 ranks were stopped"
FAILED = "rank {} failed at a.py:1: ValueError: no" + STOPPED
INNER_FAILED = f"rank 5 failed at a.py:1: RankFailedError: {FAILED.format(0)}{STOPPED}"
LATE = "the world did not finish within timeout_s=1; raise timeout_s if the program is only slow"
VICTIM = Status(cause=False, rank=4, line="rank 4 failed")


def ended(node, returncode=1, status=None, **details):
    return Job(node=node, ranks=range(4 * node, 4 * node + 4), pid=77, returncode=returncode, status=status, **details)


def failed(rank, cause):
    return RankFailedError(rank=rank, cause=cause, where=" at a.py:1", doing=[], others={}, world_size=8)


# -- who is at fault ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endings", "node"),
    [
        ([ended(0, 0), ended(1, 0)], None),
        ([ended(0, 1, VICTIM), ended(1, 1, GUILTY)], 1),
        ([ended(0, 1, VICTIM), ended(1, -9)], 1),
        ([ended(0, 1, GUILTY), ended(1, 3, GUILTY)], 0),
        ([ended(1, -9), ended(0, 3, Status(cause=True, line="3", code=3))], 1),  # `sys.exit(3)`, after its world
        ([ended(0, 1, VICTIM), ended(1, 3, Status(cause=True, line="3", code=3))], 1),
        ([ended(1, -9), ended(0, 1, GUILTY, losses={1})], 1),  # it has caught the loss, and goes on to a bug of its own
        ([ended(1, -9), ended(0, 1, GUILTY)], 0),  # its error came before the kill
        ([ended(1, 1, VICTIM), ended(0, 1, GUILTY, losses={1})], 0),  # an end that is no kill
        ([ended(1, -9, stopped=True), ended(0, 1, GUILTY, losses={1})], 0),  # the launcher's kill
        ([ended(0, -15, stopped=True), ended(1, 1, GUILTY)], 1),
        ([ended(0, -15, stopped=True), ended(1, 1, VICTIM)], 1),
        ([ended(0, 0), ended(1, 1, VICTIM)], 1),
        ([ended(1, 0, missed=True), ended(0, -15, stopped=True)], 1),
    ],
)
def test_the_cause_counts_and_not_the_clock(endings, node):
    found = find_culprit(endings)
    assert (found and found.node) == node


def test_who_is_ended_after_its_last_word_has_the_exit_code_that_it_was_about_to_have():
    """Memory and threads may take longer to give back than its launcher waits."""
    told = "overlap: rank 0 failed at a.py:1: SystemExit: 3"
    late = ended(0, -15, Status(cause=True, rank=0, text=f"{told}\n", code=3))
    assert (launch_exit_code(late), culprit_report(late)) == (3, [told])
    accuser = ended(0, -15, Status(cause=False, rank=4, code=1))
    hung = find_culprit([ended(1, -9, stopped=True), accuser])
    assert hung is not None
    assert (hung.accuser, launch_exit_code(hung)) == (accuser, 1)


def test_a_process_that_somebody_has_interrupted_is_named():
    text = "overlap: interrupted\n  rank 4 waits for rank 0\n  rank 5 computes\n"
    one = ended(1, 130, Status(cause=True, text=text, code=130))
    named = "overlap: process 1 (ranks 4-7, pid 77){} was interrupted by a SIGINT that its launcher had not sent{}"
    details = ["  rank 4 waits for rank 0", "  rank 5 computes"]
    assert culprit_report(one) == [named.format("", ""), *details]
    assert culprit_report(one, host="trn-7") == [named.format(" on trn-7", ""), *details]
    assert culprit_report(replace(one, log="out.log"))[0] == named.format("", "; all it printed is in out.log")
    assert launch_exit_code(one) == 130


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-2, 130), (-9, 137), (-15, 143)])
def test_exit_codes_are_those_of_a_shell(returncode, code):
    assert launch_exit_code(ended(0, returncode)) == code


def test_a_process_that_was_missed_has_failed():
    missed = ended(0, 0, missed=True)
    assert launch_exit_code(missed) == 1
    assert culprit_report(missed) == ["overlap: process 0 (ranks 0-3, pid 77) exited with code 0 without joining"]


def test_a_process_that_vanished_has_failed_and_is_the_cause():
    vanished = ended(1, 0, entering=Entering(world=1, joined=True))
    assert find_culprit([ended(0, 1, VICTIM), vanished]) is vanished
    assert launch_exit_code(vanished) == 1
    assert culprit_report(vanished) == [
        "overlap: process 1 (ranks 4-7, pid 77) exited with code 0 before its world had ended, as os._exit does"
    ]


def test_of_many_errors_after_a_kill_one_is_shown(capsys):
    others = [ended(node, 1, GUILTY, losses={1}) for node in (0, 2, 3)]
    outcome = LaunchOutcome(endings=[ended(1, -9), *others], first_signal=None)
    assert _report_end(outcome, 0, RunConfig()) == 137
    assert capsys.readouterr().err.splitlines() == [
        *culprit_report(others[0]),
        "overlap: 2 more processes failed after that loss, too",
        *culprit_report(ended(1, -9)),
    ]  # fmt: skip


def test_a_process_that_hung_is_at_fault_and_its_accuser_tells():
    lost = Status(cause=False, rank=5, text="overlap: rank 5 failed: PeerLostError\n")
    found = find_culprit([ended(0, 1, lost), ended(2, -15, stopped=True), ended(1, -9, stopped=True)])
    assert launch_exit_code(found) == 1
    assert culprit_report(found) == [
        "overlap: rank 5 failed: PeerLostError",
        "overlap: process 1 (ranks 4-7, pid 77) hung, and had to be stopped",
    ]


def test_a_process_that_stayed_stopped_did_not_want_for_memory():
    assert culprit_report(ended(1, -9, stopped=True)) == [
        "overlap: process 1 (ranks 4-7, pid 77) was stopped, as SIGSTOP does, and had to be killed"
    ]


@pytest.mark.parametrize(
    "other", [ended(1, 1, VICTIM, stopped=True), ended(1, -15), ended(2, -15, stopped=True), ended(1, 0)]
)
def test_who_ends_with_a_word_or_unasked_or_is_not_accused_did_not_hang(other):
    assert find_culprit([ended(0, 1, VICTIM), other]).accuser is None


# -- what is told ------------------------------------------------------------------------------------------------


def test_the_card_ends_with_the_node():
    assert culprit_report(ended(1, 1, GUILTY)) == [
        "Traceback",
        "ValueError: bad",
        "overlap: process 1 (ranks 4-7, pid 77) exited with code 1",
    ]


def test_an_error_that_tells_who_failed_is_not_told_twice():
    told = Status(cause=True, text="Traceback\noverlap: rank 4 failed: ValueError: bad\n")
    assert culprit_report(ended(1, 1, told)) == ["Traceback", "overlap: rank 4 failed: ValueError: bad"]
    details = "overlap: the world did not finish\n  rank 0: recv\n  rank 4: has finished\n"
    assert culprit_report(ended(1, 1, Status(cause=True, text=details))) == details.splitlines()
    where = "overlap: process 1 (ranks 4-7, pid 77) exited with code 1; all it printed is in l/process-1.log"
    assert culprit_report(ended(1, 1, told, log="l/process-1.log"))[2:] == [where]


def test_the_card_of_a_process_that_said_nothing():
    assert culprit_report(ended(0, 3, tail=["last words"], log="l/process-0.log")) == [
        "last words",
        "overlap: process 0 (ranks 0-3, pid 77) exited with code 3, without saying why; "
        "all it printed is in l/process-0.log",
    ]


def test_the_card_of_signals():
    begin = "overlap: process 0 (ranks 0-3, pid 77) was killed by "
    assert culprit_report(ended(0, -11)) == [begin + "SIGSEGV"]
    assert culprit_report(ended(0, -9)) == [
        begin + "SIGKILL; this launcher did not send it: somebody did, or memory ran out (`dmesg` of that machine says)"
    ]
    assert culprit_report(ended(0, -9), oom_kills=1) == [
        begin + "SIGKILL; the kernel has killed 1 here for want of memory: use fewer ranks, or smaller batches"
    ]
    large = replace(ended(0, -9), peak_bytes=3 << 30)
    assert culprit_report(large) == [
        begin + "SIGKILL; this launcher did not send it: somebody did, or memory ran out, it had 3 GiB at most "
        "(`dmesg` of that machine says)"
    ]
    assert culprit_report(large, oom_kills=2) == [
        begin + "SIGKILL; the kernel has killed 2 here for want of memory, it had 3 GiB at most: use fewer ranks, or "
        "smaller batches"
    ]
    assert culprit_report(replace(ended(0, -11), peak_bytes=3 << 30)) == [begin + "SIGSEGV"]


def test_a_card_ends_with_the_last_signs_of_who_said_nothing():
    told = culprit_report(
        ended(0, -11, tail=[str(number) for number in range(60)]), signs=["rank 0 was in x", "rank 4 waited"]
    )
    assert len(told) == 25
    assert told[-3:] == [
        "overlap: process 0 (ranks 0-3, pid 77) was killed by SIGSEGV", "  rank 0 was in x", "  rank 4 waited"
    ]  # fmt: skip


def test_a_long_card_keeps_its_beginning_and_its_end():
    told = culprit_report(ended(0, 1, Status(cause=True, text="\n".join(map(str, range(60))))))
    assert len(told) == 25
    assert told[:13] == [*map(str, range(12)), "  ... 37 lines left out ..."]
    assert told[13:24] == [str(number) for number in range(49, 60)]


def test_a_card_that_just_fits_is_whole():
    lines = [str(number) for number in range(24)]
    assert culprit_report(ended(0, 1, Status(cause=True, text="\n".join(lines))))[:24] == lines


def test_a_long_line_of_a_card_keeps_its_beginning_and_its_end():
    told = culprit_report(ended(0, 1, Status(cause=True, text=f"begin{'x' * 99_990}end!!")))
    assert told[0] == f"begin{'x' * 995} ... 98000 characters left out ... {'x' * 995}end!!"


def raised_from(cause):
    error = RuntimeError("torch's")
    error.__cause__ = cause
    return error


def raised_after(cause, *, from_none=False):
    error = SystemExit("bye")
    error.__context__, error.__suppress_context__ = cause, from_none
    return error


# -- the record --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no\nmore"), Status(cause=True, line="no")),
        (SystemExit(3), Status(cause=True, line="3")),
        (KeyboardInterrupt(), Status(cause=True, line="KeyboardInterrupt")),
        (failed(5, ValueError("no")), Status(cause=True, rank=5, line=FAILED.format(5))),
        (failed(1, ValueError("no")), Status(cause=False, rank=1, line=FAILED.format(1))),
        (failed(5, failed(0, ValueError("no"))), Status(cause=True, rank=5, line=INNER_FAILED)),
        (PeerFailedError("rank 1 failed", culprit=1), Status(cause=False, rank=1, line="rank 1 failed")),
        (PeerFailedError("the world has ended", culprit=-1), Status(cause=False, line="the world has ended")),
        (StallError(1.0, []), Status(cause=True, line=LATE)),
        (raised_from(PeerFailedError("rank 1 failed", culprit=1)), Status(cause=False, rank=1, line="torch's")),
        (raised_from(ValueError("no")), Status(cause=True, line="torch's")),
        (raised_after(failed(1, PeerFailedError("no", culprit=1))), Status(cause=False, rank=1, line="bye")),
        (raised_after(PeerFailedError("no", culprit=1), from_none=True), Status(cause=False, rank=1, line="bye")),
        (raised_after(ValueError("no")), Status(cause=True, line="bye")),
    ],
)  # fmt: skip
def test_an_error_is_judged_by_where_it_began(error, expected):
    assert status_from_error(error, local=range(4, 8)) == expected


def test_a_lost_link_is_never_the_cause():
    assert not status_from_error(LinkLostError("gone"), local=range(4, 8)).cause
    assert not status_from_error(failed(5, LinkLostError("gone")), local=range(4, 8)).cause


def test_the_record_is_read_back():
    reading, writing = os.pipe()
    status = Status(cause=True, rank=3, line="é", text="x\ny\n")
    assert report_to_launcher(status, {"OVERLAP_STATUS_FD": str(writing)})
    os.close(writing)
    assert parse_record(os.read(reading, LONGEST_BYTES)) == status
    os.close(reading)


def told_and_read(status):
    """What the launcher reads of a record that is longer than a pipe holds."""
    reading, writing = os.pipe()
    with running(Thread(target=report_to_launcher, args=(status, {"OVERLAP_STATUS_FD": str(writing)}))):
        data = bytearray()
        while not data.endswith(b"\n"):
            data += os.read(reading, 1 << 20)
    os.close(reading)
    os.close(writing)
    assert len(data) <= LONGEST_BYTES
    return parse_record(bytes(data))


def test_a_record_is_whole_whatever_a_pipe_holds():
    status = Status(cause=True, line="bad", text="begin\n" + "detail\n" * 50_000 + "end")
    assert told_and_read(status) == status


def test_the_longest_record_keeps_the_beginning_and_the_end_of_its_text():
    text = told_and_read(Status(cause=True, line="\u00fc" * 9999, text="begin" + "\0" * LONGEST_TEXT + "end")).text
    begin, left_out, end = text.split(" ... ")
    assert (begin[:6], left_out, end[-4:]) == ("begin\0", "8 characters left out", "\0end")


def test_a_world_that_is_entered_is_read_back():
    for record in (Entering(world=2, joined=True), Leaving(world=2), MemberLost(member=1, reason="it hung up")):
        assert told_and_read(record) == record


@pytest.mark.parametrize("environ", [{}, {"OVERLAP_STATUS_FD": "x"}, {"OVERLAP_STATUS_FD": "-1"}])
def test_without_a_launcher_nobody_is_told(environ):
    assert not report_to_launcher(Status(cause=True), environ)


@pytest.mark.parametrize(
    "record",
    [b"", b"x", b"\xff", b"[]", b"{}", b'["Status", 1, null, "", "", 1]', b"[" * 9999,
     b'["Status", true, "0", "", "", 1]', b'["Leaving", 1, 2]'],
)  # fmt: skip
def test_what_is_no_record_is_none(record):
    assert parse_record(record) is None


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "file", "text", "count"),
    [
        ("0::/a/b", "sys/fs/cgroup/a/b/memory.events", "low 7\noom 2\noom_kill 3\noom_group_kill 0\n", 3),
        ("4:cpu,memory:/a\n1:name=x:/a", "sys/fs/cgroup/memory/a/memory.oom_control", "under_oom 0\noom_kill 2\n", 2),
        ("0::/a/b", "sys/fs/cgroup/a/memory.events", "oom_kill 3\n", 0),
    ],
)  # fmt: skip
def test_kills_for_want_of_memory_are_counted(tmp_path, groups, file, text, count):
    for name, content in (("proc/self/cgroup", groups), (file, text)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    assert count_oom_kills(tmp_path) == count


def test_without_control_groups_none_are_counted(tmp_path):
    assert count_oom_kills(tmp_path) == 0
