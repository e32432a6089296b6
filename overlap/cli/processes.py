"""`overlap run --processes N`: starts the processes of this host, and returns the exit code of the run."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from ..config import RunConfig
from ..errors import UsageError
from ..kernel_facts import count_oom_kills
from ..launch.jobs import LaunchSpec
from ..launch.launcher import LaunchOutcome, launch
from ..launch.memory_folder import memory_folder
from ..launch.verdict import INTERRUPTED, culprit_report, find_culprit, follows_kill, launch_exit_code
from ..notice import notify, write_stderr
from ..processes.launchers import is_loopback
from ..processes.place import DEFAULT_JOB, LONGEST_JOB, find_place, without_launcher_variables
from ..processes.secret import ADVICE, VARIABLE, find_secret, generate_secret, user_secret
from ..processes.shared_folder import host_file_path
from ..processes.sockets import Endpoint, ListenError, format_endpoint, listen, parse_endpoint
from .program import relative_path
from .world_size import process_count

GRACE_S = 10.0  # as in torchrun
# How long a launcher tries to listen at a port that processes of a killed launcher may still have, and at which pauses.
_PORT_RETRY_S, _PORT_RETRY_PAUSE_S = 5.0, 0.1

_SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "the terminal is gone",
}

# Program of each started process. Unlike `python -m`, it imports this very package even if the current folder has one
# of the same name. Ctrl-C during the imports ends the process without a message, because the launcher, which passes it
# on, prints one. (An exception in a callback of the import system would be printed and ignored.)
_BOOT = """\
import os, signal, sys
interrupted = signal.getsignal(signal.SIGINT)
if interrupted is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
sys.path.insert(0, {root!r})
from overlap.cli import main
sys.path.pop(0)
signal.signal(signal.SIGINT, interrupted)
sys.exit(main())
"""


@contextmanager
def dividing_into_hosts(config: RunConfig) -> Iterator[None]:
    """Within the block, divide the processes of another launcher into `--nnodes` hosts, by OVERLAP_NNODES."""
    if config.nnodes is None or find_place() is None or os.environ.get("OVERLAP_NNODES"):
        yield
        return
    os.environ["OVERLAP_NNODES"] = str(int(config.nnodes))
    try:
        yield
    finally:
        del os.environ["OVERLAP_NNODES"]


def run_processes(config: RunConfig, program: Sequence[str]) -> int:
    """Run the program in the processes of this host, report the first failure, and return the exit code.

    Args:
        config: The configuration of the whole world.
        program: The script, or `-m` and the module, and then the arguments of the program.

    Raises:
        UsageError: The processes cannot be started; nothing has run then.
    """
    total, per_host, hosts = process_count(config), config.processes or 1, config.nnodes or 1
    first = (config.node_rank or 0) * per_host
    members = range(first, first + per_host)
    # as multiprocessing does: no public function returns the options of this interpreter
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    environ = {**without_launcher_variables(os.environ), **config.variables(), "OVERLAP_HOSTS": str(int(hosts))}
    if total > 1:
        environ.pop("OVERLAP_RANKS", None)  # otherwise the program may set them
        if config.ranks is None:
            environ["OVERLAP_RANKS_OPEN"] = "1"
    environ.pop(VARIABLE, None)  # processes get the secret by a descriptor, which their own children do not inherit
    endpoint = _rendezvous_endpoint(config)
    secret = _job_secret(config, endpoint)
    if config.log_dir is not None:
        _make_log_folder(config.log_dir)
    with (
        _witness_folder(config, hosts) as witness,
        _open_rendezvous_listener(endpoint, is_first=0 in members, again=bool(config.max_restarts)) as (
            listener,
            bound,
        ),
    ):
        if witness is not None:
            environ["OVERLAP_WITNESS"] = witness
        boot = _BOOT.format(root=str(Path(__file__).parents[2]))
        spec = LaunchSpec(
            command=[sys.executable, *flags, "-c", boot, "run", *program],
            environ=environ,
            nodes=total,
            here=members,
            ranks_per_node=config.ranks // total if config.ranks else int(total > 1),
            endpoint=bound,
            listener=listener,
            job=_job_name(config),
            secret=secret,
            prefix=config.prefix is not False and (total > 1 or config.prefix is True),
            colour=not os.environ.get("NO_COLOR") and (sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))),
            log_dir=config.log_dir,
            grace_s=config.grace_s or GRACE_S,
            report=notify,
            bind=config.bind is not False,
            witness=witness,
        )
        kills_before = count_oom_kills()
        if config.max_restarts:
            from ..launch.restarts import launch_with_restarts  # not at the top: every process would load it

            outcome = launch_with_restarts(spec, config, relative_path(config.state_dir))
        else:
            outcome = trio.run(launch, spec)
    if config.trace is not None and hosts == 1:
        _join_left_traces(config.trace, spec.job)
    return _report_end(outcome, count_oom_kills() - kills_before, config)


def _join_left_traces(path: str | os.PathLike[str], job: str) -> None:
    """Join trace files that processes have left, for example because one was killed, and print where the traces are."""
    from ..processes.traces import join_leftover_files  # of runs with a trace

    try:
        written = join_leftover_files(path, job)
    except (OSError, UsageError) as error:
        notify(f"no trace of all processes: {error}")
        return
    for trace in written:
        shown = os.path.relpath(trace)
        notify(f"trace in {shown}, of killed processes up to their last second; `overlap timeline {shown}` shows it")


def _report_end(outcome: LaunchOutcome, killed: int, config: RunConfig) -> int:
    """Print the end of a run, and return its exit code; the kernel `killed` that many processes for want of memory."""
    if outcome.first_signal is not None:
        # the note of a terminated process about the saved state, which is equal on all processes
        notes = [ending.status.line for ending in outcome.endings if ending.status and not ending.status.text]
        kept = next((note for note in notes if note.startswith("; ")), "")
        notify("\n".join([f"{_SIGNALS[outcome.first_signal]}{kept}", *_rank_state_lines(outcome)]))
        return 128 + outcome.first_signal
    guilty = find_culprit(outcome.endings)
    if guilty is None:
        return 0
    signs: list[str] = []
    if guilty.status is None or guilty.accuser is not None:
        from ..flight.ends import last_signs_of_process  # of runs that fail

        signs = last_signs_of_process(guilty.pid, config.flight_dir)
    host = socket.gethostname() if config.node_rank is not None else ""
    # errors that began after the loss of the culprit may be bugs in handlers of that loss
    later = [each for each in outcome.endings if follows_kill(each, [guilty])]
    lines = culprit_report(later[0], host=host) if later else []
    if len(later) > 1:
        lines.append(f"overlap: {len(later) - 1} more processes failed after that loss, too")
    write_stderr("\n".join([*lines, *culprit_report(guilty, oom_kills=killed, signs=signs, host=host), ""]))
    return launch_exit_code(guilty)


def _rank_state_lines(outcome: LaunchOutcome) -> list[str]:
    """Return lines with the state of ranks at an interrupt, from the report of the process that has the most."""
    reports = [ending.status.text.splitlines() for ending in outcome.endings if ending.status]
    lines = [[line for line in report if line.startswith("  ")] for report in reports if report[:1] == [INTERRUPTED]]
    return max(lines, key=len, default=[])


# -- options -----------------------------------------------------------------------------------------------------


def _rendezvous_endpoint(config: RunConfig) -> Endpoint:
    """Return host and port of the rendezvous, by default port 0 (any free one) of this host.

    Raises `UsageError` if `--rdzv-endpoint` is invalid, or has port 0, which several hosts cannot use.
    """
    if config.rdzv_endpoint is None:
        return "127.0.0.1", 0
    try:
        host, port = parse_endpoint(config.rdzv_endpoint)
    except UsageError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None
    if port == 0 and config.node_rank is not None:
        raise UsageError("--rdzv-endpoint: the hosts that are started elsewhere must know the port; name one")
    return host, port


def _job_secret(config: RunConfig, endpoint: Endpoint) -> bytes:
    """Return the given secret of the job, or a new one if all processes are started here.

    If each host starts its own, it is the user's own secret, on the loopback interface only; otherwise `UsageError`.
    """
    secret = find_secret(os.environ)
    if secret is not None or config.node_rank is None:
        return secret or generate_secret()
    if not is_loopback(endpoint[0]):
        raise UsageError(f"--node-rank: anybody who reaches {format_endpoint(endpoint)} could join the job; {ADVICE}")
    return user_secret()


def _job_name(config: RunConfig) -> str:
    """Return a unique name if all processes are started here, and a common one if each host starts its own."""
    name: str = config.job_id or (DEFAULT_JOB if config.node_rank is not None else secrets.token_hex(8))
    if len(name) > LONGEST_JOB or not name.isprintable():
        raise UsageError(f"--job-id: expected at most {LONGEST_JOB} printable characters, got {name[:80]!r}")
    return name


def _make_log_folder(path: str) -> None:
    """Make the folder of `--log-dir`, and raise `UsageError` if that fails or nothing can be written into it."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir: {path}: {error.strerror}; name another folder") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir: cannot write into {path}; name another folder")


# -- starting ----------------------------------------------------------------------------------------------------


@contextmanager
def _witness_folder(config: RunConfig, hosts: int) -> Iterator[str | None]:
    """Yield the folder of the witness of a run that survives losses; None if the run cannot survive any.

    On one host it is in memory, and made even without `--survive`, because the program may call `overlap.run(...,
    survive=True)`. Raises `UsageError` if `--witness` does not fit, or cannot be used.
    """
    if not config.survive:
        if config.witness is not None:
            raise UsageError("--witness: it decides who goes on after a loss; give --survive too")
        if config.survive is False or hosts > 1:
            yield None
            return
    if hosts > 1:
        with _shared_witness_folder(config, config.node_rank or 0) as folder:
            yield str(folder)
        return
    if config.witness is not None:
        raise UsageError("--witness: on one host the launcher has the witness in memory; leave it out")
    with memory_folder() as folder:
        yield str(folder)


@contextmanager
def _shared_witness_folder(config: RunConfig, host: int) -> Iterator[Path]:
    """Yield the folder of the witness within `--witness`, with a file of this host in it. The last host removes it.

    Raises `UsageError` if `--witness` is missing, cannot be used, or belongs to another job.
    """
    if config.witness is None:
        raise UsageError(
            "--survive: between hosts a folder decides who goes on: add --witness DIR, the same folder on a file "
            "system that all of them share, such as NFS"
        )
    if config.max_restarts:
        raise UsageError("--max-restarts: not possible with --survive on several hosts; leave out --max-restarts")
    folder = Path(os.path.abspath(config.witness), f"witness-{_job_name(config)}")
    member = host_file_path(folder, host)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        member.touch(mode=0o600, exist_ok=False)
        member.write_text(f"{secrets.token_hex(16)} {socket.gethostname()}")
    except FileExistsError:
        raise UsageError(
            f"--witness: {member} exists already: a job with this id still runs, or has lost this host; give all hosts "
            "another --job-id, or remove the folder of this file if that job has ended"
        ) from None
    except OSError as error:
        raise UsageError(f"--witness: {folder}: {error.strerror}; name a folder that exists on all hosts") from None
    try:
        yield folder
    finally:
        with suppress(OSError):
            member.unlink()
            if not [*folder.glob("host-*")]:
                shutil.rmtree(folder)


@contextmanager
def _open_rendezvous_listener(
    endpoint: Endpoint, *, is_first: bool, again: bool
) -> Iterator[tuple[int | None, Endpoint]]:
    """Listen for process 0 before it starts, so that a used port is reported at once.

    Yields the descriptor of the socket and its endpoint; None and `endpoint` if process 0 is started elsewhere. With
    `again`, a used port is tried again for a while, as processes of an earlier launcher may have it.
    """
    if not is_first:
        yield None, endpoint
        return
    try:
        listener = open_listener(endpoint, _PORT_RETRY_S if again else 0.0)
    except ListenError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None
    with listener:
        yield listener.fileno(), (endpoint[0], listener.getsockname()[1])


def open_listener(endpoint: Endpoint, patience_s: float) -> socket.socket:
    """Return a socket that listens at an endpoint; while the port is taken, try again for `patience_s` seconds.

    Raises:
        ListenError: Another process listens at the port, or the host is no address of this one.
    """
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return listen(endpoint)
        except ListenError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not taken or time.monotonic() >= until_s:
                raise
        time.sleep(_PORT_RETRY_PAUSE_S)
