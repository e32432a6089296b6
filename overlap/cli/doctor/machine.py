"""Checks of the machine: cores, memory and its bandwidth, memory between processes, clocks and limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import get_clock_info, perf_counter

import numpy as np

from transports.shared_memory import peer_memory
from transports.shared_memory.engine import BUILT
from transports.shared_memory.segment import Segment

from ...units import format_bytes
from .finding import CheckResult

_COPIED_BYTES, _COPIES = 64 << 20, 5
_SLOWEST_COPY = 3e9
"""Bytes per second; a slower copy means that other processes use the memory, or that the machine is emulated."""

_LEAST_FILES = 1024
"""Descriptors: a process needs about 8 for each process that it is joined to by sockets."""

_LEAST_MEMORY = 1 << 30

_GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
"""Clock sources of Linux that are read without a system call."""


def findings() -> Iterator[CheckResult]:
    """Yield the findings about the machine; takes about a tenth of a second."""
    yield cores(len(_own_cores()), os.cpu_count() or 1, os.getloadavg()[0], _quota())
    yield from _memory_finding()
    yield _bandwidth_finding()
    yield from _shared_memory_findings()
    yield from _clock_finding()
    yield from limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _own_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _quota() -> float | None:
    """Return the cores that a control group grants, or None."""
    with suppress(OSError, ValueError, IndexError):
        granted, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(granted) / int(period)
    return None


def cores(usable: int, all_of_machine: int, load: float, quota: float | None) -> CheckResult:
    """Return the finding about cores.

    Args:
        usable: Cores that this process may use.
        all_of_machine: Cores of the machine.
        load: Processes that wanted a core in the last minute, in the mean.
        quota: Cores that a control group grants; None: all.
    """
    text = f"{usable} of {all_of_machine} cores, load {load:.1f}"
    if quota is not None and quota < usable:
        fix = f"start at most {max(1, int(quota))} processes here"
        return CheckResult(subject="cores", state="slow", text=f"{text}; a limit grants {quota:g}", fix=fix)
    if load > usable:
        text = f"{text}: other processes take turns with ours, and times mean little"
        return CheckResult(subject="cores", state="slow", text=text)
    return CheckResult(subject="cores", state="good", text=text)


def _memory_finding() -> Iterator[CheckResult]:
    """Yield the finding about free memory, a note if little is free; nothing where /proc/meminfo cannot be read."""
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        # Lines such as "MemTotal:  1024 kB", in units of 1024 bytes.
        sizes_bytes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        free, total = sizes_bytes.get("MemAvailable", 0), sizes_bytes.get("MemTotal", 0)
        text = f"{format_bytes(free)} of {format_bytes(total)} are available"
        yield CheckResult(subject="memory", state="note" if free < _LEAST_MEMORY else "good", text=text)


def _bandwidth_finding() -> CheckResult:
    """Copy an array a few times, and return the finding about the fastest copy: bytes per second of one core."""
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.empty_like(source)
    times: list[float] = []
    for _ in range(_COPIES):
        begin = perf_counter()
        target[:] = source
        times.append(perf_counter() - begin)
    rate = _COPIED_BYTES / min(times)
    text = f"one core copies {rate / 1e9:.1f} GB/s"
    return CheckResult(subject="memory bandwidth", state="good" if rate >= _SLOWEST_COPY else "slow", text=text)


def _shared_memory_findings() -> Iterator[CheckResult]:
    """Yield findings about shared memory, its C engine, and whether a process may read another's memory."""
    subject = "shared memory"
    try:
        Segment.make(1 << 20).close_descriptor()
    except (OSError, AttributeError) as error:
        text = f"cannot be had ({error}); processes of this host are joined by sockets"
        yield CheckResult(subject=subject, state="slow", text=text)
        return
    yield CheckResult(subject=subject, state="good", text="sealed memory without a name (memfd)")
    yield engine_finding(BUILT)
    scope = _yama_scope()
    if scope > 1:
        fix = "sysctl kernel.yama.ptrace_scope=1"
        text = f"Yama ({scope}) forbids processes to read each other's memory; large inputs are copied once more"
        yield CheckResult(subject="single copy", state="slow", text=text, fix=fix)
    elif not _reads_a_child():
        text = "the system forbids to read another process's memory; large inputs are copied once more"
        yield CheckResult(subject="single copy", state="slow", text=text, fix="a container needs SYS_PTRACE")
    else:
        text = "processes may read each other's memory (process_vm_readv)"
        yield CheckResult(subject="single copy", state="good", text=text)


def engine_finding(built: bool) -> CheckResult:
    """Return the finding about the C engine for shared memory, which is slow if it is not `built`."""
    if built:
        text = "is compiled: it carries messages and collectives between processes of this host"
        return CheckResult(subject="host engine", state="good", text=text)
    text = "is not compiled; sockets join processes of this host: operations take 3 to 6 times as long"
    fix = "install a C compiler and the headers of Python, then install overlap again"
    return CheckResult(subject="host engine", state="slow", text=text, fix=fix)


def _yama_scope() -> int:
    """Return the kernel's rule for reading other processes' memory: 0 all of the user, 1 only children, above less."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    return 0


def _reads_a_child() -> bool:
    """Whether this process may read the memory of one that it has started."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            begin = int(Path(f"/proc/{child.pid}/maps").read_text(encoding="ascii").partition("-")[0], 16)
            peer_memory.read_memory(child.pid, begin, bytearray(8))
        except (OSError, ValueError, AttributeError):
            return False
        finally:
            child.kill()
    return True


def _clock_finding() -> Iterator[CheckResult]:
    """Yield the finding about the system's clock source; nothing where it cannot be read."""
    resolution = get_clock_info("perf_counter").resolution
    with suppress(OSError):
        folder = Path("/sys/devices/system/clocksource/clocksource0")
        source = (folder / "current_clocksource").read_text(encoding="ascii").strip()
        yield clock(source, resolution, (folder / "available_clocksource").read_text(encoding="ascii").split())


def clock(source: str, resolution_s: float, available: list[str]) -> CheckResult:
    """Return the finding about the clock that spans are measured with.

    Args:
        source: The system's source of time.
        resolution_s: Resolution of `time.perf_counter`.
        available: Sources that the system could use.
    """
    text = f"{source}, resolution {resolution_s * 1e9:.0f} ns"
    better = [each for each in available if each in _GOOD_CLOCKS]
    if source in _GOOD_CLOCKS or not better:
        return CheckResult(subject="clock", state="good", text=text)
    fix = f"echo {better[0]} >/sys/devices/system/clocksource/clocksource0/current_clocksource"
    return CheckResult(subject="clock", state="slow", text=f"{text}: each look is a system call", fix=fix)


def limits(files: int) -> Iterator[CheckResult]:
    """Yield the finding about limits of the shell.

    Args:
        files: Descriptors that a process may have open.
    """
    if 0 <= files < _LEAST_FILES:  # RLIM_INFINITY is negative
        text = f"{files} open files; a world of many processes needs more"
        yield CheckResult(subject="limits", state="note", text=text, fix=f"ulimit -n {_LEAST_FILES}")
    else:
        yield CheckResult(subject="limits", state="good", text=f"{files if files >= 0 else 'any number of'} open files")
