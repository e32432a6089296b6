"""`overlap demo --survive`: trains on two processes, kills the first one, and shows how a spare takes its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import OverlapError
from ...launch.verdict import headline
from ...timeline.draw.view import TimelineView
from ...timeline.files.tracefile import read_trace
from ...units import format_ns
from ..console import Console
from ..processes import boot
from .survivor import replay_digest

_VICTIM, _SURVIVOR, _SPARE = 0, 1, 2
_KILL_AT = 20  # step after whose end the victim is killed


@dataclass
class _Story:
    """Output of the processes, as far as it tells the story."""

    pids: dict[int, int] = field(default_factory=dict)
    history: list[tuple[list[int], int]] = field(default_factory=list)
    ends_ns: dict[int, int] = field(default_factory=dict)  # of steps of the survivor, by number
    digests: dict[int, str] = field(default_factory=dict)  # of the weights at the end, by process
    killed_ns: int = 0
    first_ns: int = 0  # the end of the first step with the spare

    def record(self, member: int, line: dict[str, object]) -> None:
        """Record one line of output of a process."""
        if "pid" in line and member not in self.pids:
            self.pids[member] = int(str(line["pid"]))
        if "digest" in line:
            self.digests[member] = str(line["digest"])
        if member != _SURVIVOR:
            return
        if "members" in line:
            self.history.append((list(line["members"]), int(str(line["step"]))))  # type: ignore[call-overload]
        elif "end" in line and self.killed_ns and len(self.history) == 2 and not self.first_ns:
            self.first_ns = int(str(line["at_ns"]))


def demonstrate(console: Console, *, steps: int, width: int, ascii: bool) -> bool:
    """Run the job; return whether its weights equal the weights of a run with the same history of members.

    Raises:
        OverlapError: If the job fails.
    """
    steps = max(steps, 2 * _KILL_AT)
    console.print(
        f"training on 2 processes for {steps} steps, with a spare; the first one is killed after step {_KILL_AT}"
    )
    with tempfile.TemporaryDirectory() as folder:
        story, code, errors = _run_job(console, steps, folder)
        if code != 0 or not story.first_ns:
            raise OverlapError(
                f"demo: the job ended with code {code}: {headline(errors.splitlines())}; "
                "check this machine with `overlap doctor`"
            )
        timeline = read_trace(Path(folder, f"process-{_SURVIVOR}.json"))
    console.print("\nthe survivor, from its first step to its last; the gap is the loss:")
    console.print(TimelineView(timeline, width=width, ascii=ascii))
    pause, (members, step) = format_ns(story.first_ns - story.killed_ns), story.history[1]
    names = " and ".join(map(str, members))
    console.print(f"\nfrom the kill to the end of the next step: {pause}; processes {names} went on after step {step}")
    same = story.digests == dict.fromkeys(members, replay_digest(story.history, steps))
    console.print(
        f"weights of both are {'equal to' if same else 'NOT EQUAL TO'} those of a run with the same history of members"
    )
    return same


def _run_job(console: Console, steps: int, folder: str) -> tuple[_Story, int, str]:
    """Run the job and kill its victim; return its story, its exit code, and its stderr."""
    command = [sys.executable, "-c", boot(), "run", "--survive", "--processes", "2", "--spares", "1"]
    command += ["--log-dir", folder, "-m", "overlap.cli.demo.survivor", str(steps), folder]
    story, logs = _Story(), [Path(folder, f"process-{member}.log") for member in (_VICTIM, _SURVIVOR, _SPARE)]
    read = [0] * len(logs)
    with tempfile.TemporaryFile("w+") as errors:
        job = subprocess.Popen(command, stdout=errors, stderr=errors)
        try:
            over = False
            while not over:
                over = job.poll() is not None
                for member, log in enumerate(logs):
                    read[member] += _read_log(story, member, log, read[member], console)
                time.sleep(0.002)
        finally:
            job.terminate()
            job.wait()
        errors.seek(0)
        return story, job.returncode, errors.read()


def _read_log(story: _Story, member: int, log: Path, start: int, console: Console) -> int:
    """Take new whole lines of a log, and kill the victim when it is time; return how many bytes they have."""
    if not log.exists():
        return 0
    new = log.read_bytes()[start:].rpartition(b"\n")[0]
    for text in new.decode(errors="replace").splitlines():
        if not text.startswith("{"):
            console.print(text, soft_wrap=True)
            continue
        line = json.loads(text)
        story.record(member, line)
        if line.get("end") == _KILL_AT and not story.killed_ns and len(story.pids) == 2:
            story.killed_ns = time.perf_counter_ns()
            os.kill(story.pids[_VICTIM], signal.SIGKILL)
            console.print(f"step {_KILL_AT} has ended: process {_VICTIM} (pid {story.pids[_VICTIM]}) is killed")
    return len(new) + 1 if new else 0
