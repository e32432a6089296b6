"""How long a launcher waits for nodes that it has asked to end, and what it does then: on a clock of the test."""

import os
import signal
import subprocess
from math import inf
from signal import SIGINT, SIGKILL, SIGTERM
from types import SimpleNamespace

import pytest

from overlap import kernel_facts
from overlap.launch.jobs import (
    PATIENCE_S,
    PEACE_S,
    SEARCH_S,
    STOPPED_S,
    SUSPECT_S,
    Jobs,
    KernelState,
    Kill,
    LaunchSpec,
)
from overlap.launch.launcher import read_child_state
from overlap.processes.members import PrintLine
from overlap.processes.status import Entering, Leaving, Status
from overlap.processes.wire import MemberLost

GRACE_S = 30.0
NODE_1 = "process 1 (rank 1, pid 11)"


class Node:
    """The process of a node that ends at an instant of the test's clock, or so long after a signal.

    It is in a world from the beginning, unless it is `outside` of any. From another instant on it waits for the others
    to come to its world.
    """

    def __init__(
        self, node, *, ends_s=inf, waits_s=inf, joins_s=inf, returncode=0, status=None, losses=(), stopped_s=(),
        outside=False, held=False, kernel=(), queued=0.0, **after,
    ):  # fmt: skip
        self.node, self.ends_s, self._last = node, ends_s, returncode
        self._stopped_s, self._held, self._kernel = stopped_s, held, kernel  # in it from the beginning, by second
        self._queued = queued  # share of the time in which it waits for a processor
        self.got = []
        self._after_s = {SIGINT: 0.0, SIGTERM: 0.0, SIGKILL: 0.0} | {signal.Signals[key]: s for key, s in after.items()}
        begin = [(0.0, status)] if status else []
        begin += [(0.0, Entering(world=1, joined=True))] if not outside and waits_s == inf else []
        self.records = [
            *begin,
            *((instant_s, MemberLost(member=other, reason="")) for instant_s, other in losses),
            *[(waits_s, Entering(world=1, joined=False)), (joins_s, Entering(world=1, joined=True))],
        ]

    def look(self, now_s):
        queued_s = self._queued * now_s
        if any(begin <= now_s < end for begin, end in self._stopped_s):
            return KernelState(letter="T", reason="is stopped, as SIGSTOP does", queued_s=queued_s)
        second = int(now_s) - 1
        if 0 <= second < len(self._kernel) and self._kernel[second]:
            return KernelState(letter="D", reason=self._kernel[second], queued_s=queued_s)
        return KernelState(letter="t", reason="is held by a debugger") if self._held else KernelState(queued_s=queued_s)

    def send(self, number, now_s):
        self.got.append((now_s, number))
        self.ends_s = min(self.ends_s, now_s + self._after_s[number])

    @property
    def returncode(self):
        return -self.got[-1][1] if self.got else self._last


def launched(*lives, ctrl_c_s=(), elsewhere=0, first=0):
    """Launch nodes of a world, which may have more elsewhere, and press Ctrl-C at some instants.

    Returns (outcome, nodes, what was reported when, end).
    """
    nodes, told, now_s = {node: Node(node, **life) for node, life in enumerate(lives, first)}, [], 0.0
    spec = LaunchSpec(
        command=["none"], environ={}, nodes=first + len(lives) + elsewhere, here=range(first, first + len(lives)),
        ranks_per_node=1, endpoint=("10.0.0.1", 29500), listener=None, job="", secret=b"of this test",
        prefix=False, colour=False, log_dir=None, grace_s=GRACE_S, report=print,
    )  # fmt: skip
    jobs = Jobs(spec, lambda node: nodes[node].look(now_s), now_s)
    for node in nodes:
        jobs.add_process(node, 10 + node)

    def act(actions):
        for action in actions:
            match action:
                case Kill(node, number):
                    nodes[node].send(number, now_s)
                case PrintLine(text):
                    told.append((now_s, text))

    presses_s = list(ctrl_c_s)
    while jobs.running:
        running = [nodes[job.node] for job in jobs.running]
        coming_s = [instant_s for node in running for instant_s, _ in node.records] + presses_s
        now_s = min([jobs.next_s, *coming_s, *(node.ends_s for node in running)])
        assert now_s < inf
        while presses_s and presses_s[0] <= now_s:
            act(jobs.on_signal(presses_s.pop(0), SIGINT))
        for node in running:
            while node.records and node.records[0][0] <= now_s:
                act(jobs.on_record(now_s, node.node, node.records.pop(0)[1]))
        for node in running:
            if node.ends_s <= now_s:
                act(jobs.on_record(now_s, node.node, Leaving(world=1)) if node.returncode == 0 else ())
                act(jobs.on_exit(now_s, node.node, node.returncode))
                act(jobs.on_end(now_s, node.node, drained=False, survived=False))
        if jobs.running and jobs.next_s <= now_s:
            act(jobs.on_tick(now_s))
    for node in nodes.values():
        node.stopped = jobs.jobs[node.node].stopped
    outcome = SimpleNamespace(first_signal=jobs.first_signal, endings=[job.node for job in jobs.ended])
    return outcome, [*nodes.values()], told, now_s


def waits(*nodes):
    names = ", ".join(f"process {node}" for node in nodes)
    return f"waiting up to 30 s for {names} to end; once more, and they are killed at once"


def test_a_host_that_waits_for_the_others_says_so_once_and_that_it_has_joined():
    lives = [{"waits_s": 1, "joins_s": 5, "ends_s": 9}, {"waits_s": 2, "joins_s": 6, "ends_s": 9}]
    joining = [(1, "node 2 waits for the other nodes, at 10.0.0.1:29500"), (5, "node 2 has joined")]
    assert launched(*lives, first=4)[2] == joining
    assert launched(*lives, elsewhere=2)[2] == []


def test_after_ctrl_c_a_slow_node_is_left_alone_to_its_own_end():
    outcome, nodes, told, end_s = launched({}, {"SIGINT": 20}, ctrl_c_s=[5])
    assert [node.got for node in nodes] == [[(5, SIGINT)]] * 2
    assert (end_s, outcome.first_signal, outcome.endings) == (25, SIGINT, [0, 1])
    assert told == [(5 + PATIENCE_S, waits(1))]


def test_nodes_that_end_at_once_are_not_waited_for():
    outcome, nodes, told, end_s = launched({"SIGINT": 0.5}, {}, ctrl_c_s=[5])
    assert [node.got for node in nodes] == [[(5, SIGINT)]] * 2
    assert (end_s, outcome.endings, told) == (5.5, [1, 0], [])


def test_the_second_ctrl_c_kills_who_is_left():
    outcome, nodes, told, end_s = launched({}, {"SIGINT": 20}, {"SIGINT": inf}, ctrl_c_s=[5, 8])
    assert [node.got for node in nodes] == [[(5, SIGINT)], *[[(5, SIGINT), (8, SIGKILL)]] * 2]
    assert (end_s, outcome.first_signal, told) == (8, SIGINT, [(5 + PATIENCE_S, waits(1, 2))])


def test_after_the_grace_who_is_left_is_killed():
    outcome, nodes, told, end_s = launched({"SIGINT": 29}, {"SIGINT": inf}, ctrl_c_s=[1])
    assert [node.got for node in nodes] == [[(1, SIGINT)], [(1, SIGINT), (1 + GRACE_S, SIGKILL)]]
    assert (end_s, outcome.endings) == (1 + GRACE_S, [0, 1])
    assert told[1:] == [(1 + GRACE_S, "process 1 did not end within 30 s and is killed")]


def test_a_node_that_a_crowded_host_keeps_from_running_has_the_grace_in_time_that_it_runs():
    outcome, nodes, told, end_s = launched({"SIGINT": 45, "queued": 0.5}, {"SIGINT": 20}, ctrl_c_s=[1])
    assert [node.got for node in nodes] == [[(1, SIGINT)]] * 2
    assert (end_s, outcome.endings, len(told)) == (46, [1, 0], 1)


def test_a_node_that_could_run_and_does_not_end_is_killed_all_the_same():
    _, nodes, _, end_s = launched({"SIGINT": inf, "queued": 0.5}, {"SIGINT": inf}, ctrl_c_s=[0])
    assert [node.got[-1] for node in nodes] == [(2 * GRACE_S, SIGKILL), (GRACE_S, SIGKILL)]
    assert end_s == 2 * GRACE_S
    _, nodes, _, end_s = launched({"SIGINT": inf, "queued": 1.0}, ctrl_c_s=[0])
    assert end_s == 15 * GRACE_S


def test_a_failure_gives_the_others_time_to_find_out_and_then_tells_them():
    outcome, nodes, told, end_s = launched({"ends_s": 3, "returncode": 1}, {"SIGTERM": 2}, {"SIGTERM": inf})
    told_s = 3 + PEACE_S
    assert [node.got for node in nodes] == [[], [(told_s, SIGTERM)], [(told_s, SIGTERM), (told_s + GRACE_S, SIGKILL)]]
    assert (end_s, outcome.first_signal, outcome.endings) == (told_s + GRACE_S, None, [0, 1, 2])
    assert told == [(end_s, "process 2 did not end within 30 s and is killed")]
    assert [node.stopped for node in nodes] == [False, True, True]


def test_who_waits_for_all_to_come_is_given_no_time_to_find_out_that_one_will_not():
    failing = {"ends_s": 3, "returncode": 1}
    _, nodes, _, end_s = launched(failing, {"waits_s": 1}, {"waits_s": 2})
    assert [node.got for node in nodes] == [[], [(3, SIGTERM)], [(3, SIGTERM)]]
    _, nodes, _, end_s = launched(failing, {"waits_s": 1}, {"waits_s": 4})
    assert [node.got for node in nodes] == [[], [(4, SIGTERM)], [(4, SIGTERM)]]
    _, nodes, _, end_s = launched(failing, {"waits_s": 1}, {})
    assert [node.got for node in nodes] == [[], [(3 + PEACE_S, SIGTERM)], [(3 + PEACE_S, SIGTERM)]]
    assert end_s == 3 + PEACE_S


def test_after_a_kill_nobody_is_let_into_a_world_that_will_not_be():
    killed = {"ends_s": 3, "returncode": -SIGKILL}
    _, nodes, _, _ = launched(killed, {"waits_s": 1}, {"waits_s": 90})
    assert [node.got for node in nodes] == [[], [(3, SIGTERM)], [(3, SIGTERM)]]
    assert [node.stopped for node in nodes] == [False, True, True]
    _, nodes, _, _ = launched(killed, {"waits_s": 90}, {})  # who is in a world finds out, as after any failure
    assert [node.got for node in nodes] == [[], [(3, SIGTERM)], [(3 + PEACE_S, SIGTERM)]]
    said = {**killed, "status": Status(cause=True)}
    _, nodes, _, _ = launched(said, {"waits_s": 4})
    assert [node.got for node in nodes] == [[], [(4, SIGTERM)]]


def test_after_a_victim_the_one_at_fault_has_longer():
    victim = {"ends_s": 3, "returncode": 1, "status": Status(cause=False)}
    _, nodes, _, end_s = launched(victim, {})
    assert nodes[1].got == [(end_s, SIGTERM)]
    assert end_s == 3 + SEARCH_S + PEACE_S
    _, nodes, _, end_s = launched(victim, {"ends_s": 4, "returncode": 1}, {})
    assert nodes[2].got == [(end_s, SIGTERM)]
    assert end_s == 4 + PEACE_S


def test_a_node_that_is_given_up_and_stopped_is_killed_at_once():
    _, nodes, told, end_s = launched(
        {"losses": [(15, 1), (15, 2)], "ends_s": 16, "returncode": 1, "status": Status(cause=False)},
        {"stopped_s": [(0, inf)]},
        {"ends_s": 16},
    )
    assert [node.got for node in nodes] == [[], [(15, SIGKILL)], []]
    assert (end_s, told, [node.stopped for node in nodes]) == (16, [], [False, True, False])


def test_a_node_that_stays_stopped_is_killed_where_others_cannot_see_that():
    again = [(2.5, 16.5), (20.5, inf)]  # the first time it goes on within 15 s
    outcome, nodes, told, end_s = launched({}, {"stopped_s": again, "ends_s": 4000}, elsewhere=1)
    killed_s = 20 + STOPPED_S
    assert [node.got for node in nodes] == [[(end_s, SIGTERM)], [(killed_s, SIGKILL)]]
    assert (end_s, outcome.endings, [node.stopped for node in nodes]) == (killed_s + PEACE_S, [1, 0], [True, True])
    assert told == [
        (
            killed_s,
            f"{NODE_1} has been stopped for 15 s, as SIGSTOP does, and is killed: other processes wait for it; SIGCONT "
            "lets a process go on in time, and a debugger holds one for longer",
        )
    ]


def test_a_node_that_is_stopped_while_others_wait_for_it_to_join_is_named_and_killed():
    _, nodes, told, _ = launched({"waits_s": 0.5}, {"stopped_s": [(0.5, inf)], "outside": True})
    assert nodes[1].got == [(STOPPED_S, SIGKILL)]
    assert [(when_s, line.split(":")[0]) for when_s, line in told] == [
        (SUSPECT_S, f"{NODE_1} is stopped, as SIGSTOP does, for 5 s now; others wait for it to join"),
        (STOPPED_S, f"{NODE_1} has been stopped for 15 s, as SIGSTOP does, and is killed"),
    ]


def test_the_kernel_says_of_a_process_that_it_is_stopped():
    process = subprocess.Popen(["sleep", "1000"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        state = read_child_state(process.pid)
        assert (state.letter, state.reason) == ("T", "is stopped, as SIGSTOP does")
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (read_child_state(process.pid).letter, read_child_state(process.pid).reason) == ("", "")
        process.wait()


ON_A_DISK = "waits in the kernel, for a disk or for memory"


@pytest.mark.parametrize(
    ("letter", "function", "said"),
    [
        ("D", "mem_cgroup_handle_over_high", ("D", "waits for memory (in mem_cgroup_handle_over_high)")),
        ("D", "reclaim_throttle", ("D", "waits for memory (in reclaim_throttle)")),
        ("D", "folio_wait_bit_common", ("D", f"{ON_A_DISK} (in folio_wait_bit_common)")),
        ("D", "0", ("D", ON_A_DISK)),  # the kernel does not tell
        ("D", None, ("D", ON_A_DISK)),
        ("S", "do_epoll_wait", ("", "")),  # for a peer or for a user
        ("R", "0", ("", "")),
        ("T", "do_signal_stop", ("T", "is stopped, as SIGSTOP does")),
    ],
)
def test_the_kernel_says_of_a_process_that_it_waits_for_memory(tmp_path, monkeypatch, letter, function, said):
    monkeypatch.setattr(kernel_facts, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) {letter} {' '.join(['0'] * 49)}")
    if function is not None:
        (tmp_path / "7" / "wchan").write_text(function)
    assert (read_child_state(7).letter, read_child_state(7).reason) == said


def test_a_node_that_waits_for_memory_is_named_with_its_last_reason_and_left_alone():
    kernel = ["waits A", "waits B", "waits C", "waits B", "waits for memory (in reclaim_throttle)", *["waits A"] * 20]
    _, nodes, told, end_s = launched({"waits_s": 0.5, "ends_s": 40}, {"kernel": kernel, "ends_s": 40, "outside": True})
    assert ([node.got for node in nodes], end_s) == ([[], []], 40)
    assert told == [
        (SUSPECT_S, f"{NODE_1} waits for memory (in reclaim_throttle), for 5 s now; others wait for it to join")
    ]
    moving = ["waits A", "waits A", "waits A", "waits A", "", "waits A"]
    assert launched({"waits_s": 0.5, "ends_s": 9}, {"kernel": moving, "ends_s": 9, "outside": True})[2] == []


def test_a_node_in_a_debugger_is_named_and_left_alone():
    _, nodes, told, end_s = launched({"waits_s": 0.5, "ends_s": 40}, {"held": True, "ends_s": 40, "outside": True})
    assert ([node.got for node in nodes], end_s) == ([[], []], 40)
    assert told == [(SUSPECT_S, f"{NODE_1} is held by a debugger, for 5 s now; others wait for it to join")]


@pytest.mark.slow
def test_a_node_that_is_stopped_is_left_alone_where_all_others_can_see_that():
    _, nodes, told, end_s = launched({"stopped_s": [(0, inf)], "ends_s": 4000}, {"ends_s": 4000})
    assert ([node.got for node in nodes], told, end_s) == ([[], []], [], 4000)


def test_a_node_that_is_stopped_and_told_to_end_has_its_grace():
    _, nodes, told, end_s = launched({"stopped_s": [(0, inf)], "SIGINT": inf}, ctrl_c_s=[1], elsewhere=1)
    assert nodes[0].got == [(1, SIGINT), (1 + GRACE_S, SIGKILL)]
    assert (end_s, len(told)) == (1 + GRACE_S, 2)


@pytest.mark.slow
def test_a_node_that_ends_well_ends_nobody():
    outcome, nodes, told, end_s = launched({"ends_s": 3}, {"ends_s": 4000})
    assert [node.got for node in nodes] == [[], []]
    assert (end_s, outcome.endings, told) == (4000, [0, 1], [])
