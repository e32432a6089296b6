"""`overlap run --nnodes N`: checks its options, starts the processes of the nodes, and returns the exit code."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from ..config import RunConfig
from ..errors import UsageError
from ..kernel_facts import oom_kills
from ..launch.mpi import find_mpiexec
from ..launch.nodeprocess import LaunchSpec
from ..launch.processes import LaunchOutcome, launch
from ..launch.verdict import INTERRUPTED, card, culprit, exit_code
from ..notice import notify, write_stderr
from ..processes.launchers import is_loopback
from ..processes.place import DEFAULT_JOB, LONGEST_JOB, Place, find_place, without_membership
from ..processes.secret import ADVICE, VARIABLE, generate, given_secret, user_secret
from ..processes.sockets import Endpoint, ListenError, format_endpoint, listen, parse_endpoint

GRACE_S = 10.0  # as in torchrun
# A launcher that takes the place of one that was killed waits so long for its processes to end, which listen there.
_ENDING_S, _AGAIN_S = 5.0, 0.1

_SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "the terminal is gone",
}

# Imports this very package whatever the current folder holds, unlike `python -m`. Ctrl-C during the imports exits
# without a message, because the launcher, which passes it on, prints one; an exception in a callback of the import
# system would be printed and ignored.
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


def fitted(config: RunConfig) -> RunConfig:
    """Return the configuration with the ranks of the whole world, after a check of the options for nodes.

    Raises:
        UsageError: If options contradict each other or the launcher that has started this process.
    """
    _check(config)
    place = find_place()
    if place is not None:
        _check_launcher(config, place)
    elif config.sources.get("spares") == "--spares":  # the variable is inherited by what a member starts
        _check_spares(config)
    if config.processes is not None and place is None:
        config = _on_processes(config, config.processes)
        if config.ranks is None:  # the program says it
            return config
    nodes, each = config.nnodes, config.ranks_per_process
    if nodes is None:
        nodes = place.processes if place and each else 1
    if each is None and nodes > 1:
        each = _share(config, nodes)
    if each is None:
        return config
    if config.ranks not in (None, nodes * each):
        raise UsageError(f"--ranks {config.ranks} are not --ranks-per-process {each} on --nnodes {nodes}")
    return config.changed(None if config.ranks else "--ranks-per-process", ranks=nodes * each)


def _on_processes(config: RunConfig, processes: int) -> RunConfig:
    """Return the configuration of several processes of one node, each of which is started like a node."""
    hosts = 1
    if config.node_rank is not None and config.ranks_per_process is None:
        if config.max_restarts:
            raise UsageError("--processes: --max-restarts on several hosts needs one process on each; leave one out")
        hosts = config.nnodes or 1
        processes *= hosts
    elif given := [name for name in ("nnodes", "ranks_per_process", "node_rank") if getattr(config, name) is not None]:
        option = given[0].replace("_", "-")
        raise UsageError(f"--processes: those of this machine are meant, with --ranks in all; leave out --{option}")
    if config.ranks is None and config.cluster in (None, "local"):
        return config.changed("--processes", nnodes=processes)
    ranks = config.ranks or _share(config, 1)
    if ranks % processes:
        among = f"--nnodes {hosts} with --processes {config.processes}" if hosts > 1 else f"--processes {processes}"
        raise UsageError(f"{ranks} ranks cannot be divided among {among}")
    return config.changed(None if config.ranks else "--processes", ranks=ranks).changed("--processes", nnodes=processes)


def _check_launcher(config: RunConfig, place: Place) -> None:
    if config.max_restarts:
        raise UsageError(f"--max-restarts: {place.source} has started this process, and would have to start it again")
    nodes, node = config.nnodes or config.processes, config.node_rank
    if nodes not in (None, place.processes) or node not in (None, place.process):
        asked = f"--{'nnodes' if config.nnodes else 'processes'} {nodes}" + (
            "" if node is None else f" --node-rank {node}"
        )
        raise UsageError(
            f"{asked}: {place.source} has started this process as number {place.process} of {place.processes}; "
            "leave out the options, or the launcher"
        )


def starts_nodes(config: RunConfig) -> bool:
    """Return whether this command starts the processes of the program."""
    several = config.nnodes is not None and config.nnodes > 1
    return (several or bool(config.max_restarts)) and find_place() is None


@contextmanager
def among_nodes(config: RunConfig) -> Iterator[None]:
    """Divide the processes of another launcher into `--nnodes` nodes, for the block."""
    if config.nnodes is None or find_place() is None or os.environ.get("OVERLAP_NNODES"):
        yield
        return
    os.environ["OVERLAP_NNODES"] = str(config.nnodes)
    try:
        yield
    finally:
        del os.environ["OVERLAP_NNODES"]


def run_nodes(config: RunConfig, program: Sequence[str]) -> int:
    """Run the program on the nodes of this machine, report the first failure, and return the exit code.

    Args:
        config: The configuration of the whole world.
        program: The script or `-m` and the module, and its arguments.

    Raises:
        UsageError: If it cannot start; nothing has run then.
    """
    nodes = config.nnodes or 1
    assert config.ranks or nodes == 1 or config.processes
    # as multiprocessing does: no public function returns the options of this interpreter
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", boot(), "run", *program]
    environ = {**without_membership(os.environ), **config.variables()}
    if nodes > 1:
        environ.pop("OVERLAP_RANKS", None)  # otherwise the program may set them
    here, hosts = range(nodes), 1
    if config.node_rank is not None:
        each = config.processes or 1
        here, hosts = range(config.node_rank * each, (config.node_rank + 1) * each), nodes // each
    if config.processes is not None or hosts > 1:
        environ["OVERLAP_HOSTS"] = str(hosts)
    if config.processes is not None and config.ranks is None:
        environ["OVERLAP_RANKS_OPEN"] = "1"
    environ.pop(VARIABLE, None)  # they inherit a descriptor of it, which their own children do not
    endpoint = _endpoint(config)
    secret = _secret(config, endpoint)
    if config.log_dir is not None:
        _make_folder(config.log_dir)
    with (
        _witness(config, hosts) as witness,
        _listening(endpoint, here=0 in here, again=bool(config.max_restarts)) as (listener, bound),
    ):
        if witness is not None:
            environ["OVERLAP_WITNESS"] = witness
        what = LaunchSpec(
            command=command,
            environ=environ,
            nodes=nodes,
            here=here,
            ranks_per_node=config.ranks // nodes if config.ranks else int(nodes > 1),
            endpoint=bound,
            listener=listener,
            job=_job(config),
            secret=secret,
            prefix=config.prefix is not False and (nodes > 1 or config.prefix is True),
            colour=_colour(os.environ),
            log_dir=config.log_dir,
            grace_s=config.grace_s or GRACE_S,
            report=notify,
            mpiexec=find_mpiexec() if config.transport == "mpi" else None,
            bind=config.bind is not False,
            witness=witness,
            spares=config.spares or 0,
        )
        killed = oom_kills()
        outcome = _run_again(what, config) if config.max_restarts else trio.run(launch, what)
    return _end(outcome, oom_kills() - killed, config)


def _run_again(what: LaunchSpec, config: RunConfig) -> LaunchOutcome:
    from .restarts import run_again  # not at the top: every node would load it

    return run_again(what, config)


def _end(outcome: LaunchOutcome, killed: int, config: RunConfig) -> int:
    announced = not config.unannounced
    if outcome.asked is not None:
        if announced:
            notify("\n".join([f"{_SIGNALS[outcome.asked]}{_kept(outcome)}", *_standings(outcome)]))
        return 128 + outcome.asked
    guilty = culprit(outcome.endings)
    if guilty is None:
        return 0
    silent = guilty.status is None or guilty.accuser is not None
    signs = _last_signs(guilty.pid, config) if silent else []
    host = socket.gethostname() if config.node_rank is not None else ""
    write_stderr("\n".join([*card(guilty, oom_kills=killed, signs=signs, host=host), ""]))
    return exit_code(guilty)


def _last_signs(pid: int, config: RunConfig) -> list[str]:
    from ..flight.autopsy import last_signs_of  # of runs that fail

    return last_signs_of(pid, config.flight_dir)


def _kept(outcome: LaunchOutcome) -> str:
    """Return the note of a terminated process about the saved state, which is equal on all processes."""
    told = [ending.status.line for ending in outcome.endings if ending.status and not ending.status.text]
    return next((line for line in told if line.startswith("; ")), "")


def _standings(outcome: LaunchOutcome) -> list[str]:
    """Return the state of the ranks at the interrupt, from the node that knows most of them."""
    told = [ending.status.text.splitlines() for ending in outcome.endings if ending.status]
    lines = [[line for line in text if line.startswith("  ")] for text in told if text[:1] == [INTERRUPTED]]
    return max(lines, key=len, default=[])


# -- options -----------------------------------------------------------------------------------------------------


def _check(config: RunConfig) -> None:
    _check_range(config)
    if config.node_rank is None:
        return
    if config.nnodes is None or config.rdzv_endpoint is None:
        raise UsageError("--node-rank needs --nnodes and --rdzv-endpoint, the same for all nodes")
    if config.node_rank >= config.nnodes:
        raise UsageError(f"--node-rank {config.node_rank}: nodes are numbered from 0, and --nnodes is {config.nnodes}")
    if config.transport == "mpi":
        raise UsageError(
            "--node-rank: with --transport mpi all nodes are started here; on several machines start mpiexec yourself: "
            "mpiexec -n 2 python -m mpi4py train.py"
        )


def _check_range(config: RunConfig) -> None:
    """Refuse a range of nodes without restarts, which alone start fewer of them."""
    if getattr(config.nnodes, "fewest", config.nnodes) != config.nnodes and not config.max_restarts:
        raise UsageError(f"--nnodes {config.nnodes}: fewer are tried only with --max-restarts; give it too")


def _check_spares(config: RunConfig) -> None:
    if config.spares and not (config.survive and (config.processes or config.nnodes or 1) > 1):
        raise UsageError("--spares: they take the places of lost processes; give --survive and --processes 2 or more")


def _share(config: RunConfig, nodes: int) -> int:
    """Return the ranks of each node, from those of the world."""
    ranks = config.ranks
    if ranks is None and config.cluster not in (None, "local"):
        from topology import cluster

        ranks = cluster(str(config.cluster)).world_size
    if ranks is None:
        return 1
    if ranks % nodes:
        raise UsageError(f"{ranks} ranks cannot be divided among --nnodes {nodes}; say --ranks-per-process")
    return ranks // nodes


def _endpoint(config: RunConfig) -> Endpoint:
    if config.rdzv_endpoint is None:
        return "127.0.0.1", 0
    try:
        host, port = parse_endpoint(config.rdzv_endpoint)
    except UsageError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None
    if port == 0 and config.node_rank is not None:
        raise UsageError("--rdzv-endpoint: the nodes that are started elsewhere must know the port")
    return host, port


def _secret(config: RunConfig, endpoint: Endpoint) -> bytes:
    given = given_secret(os.environ)
    if given is not None or config.node_rank is None:
        return given or generate()
    if not is_loopback(endpoint[0]):
        raise UsageError(f"--node-rank: anybody who reaches {format_endpoint(endpoint)} could join the job; {ADVICE}")
    return user_secret()


def _job(config: RunConfig) -> str:
    """Return a unique name if all nodes are started here, and a common one if they are started by hand."""
    name: str = config.job_id or (DEFAULT_JOB if config.node_rank is not None else secrets.token_hex(8))
    if len(name) > LONGEST_JOB or not name.isprintable():
        raise UsageError(f"--job-id: expected at most {LONGEST_JOB} printable characters, got {name[:80]!r}")
    return name


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir: {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir: cannot write into {path}")


def _colour(environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and (sys.stdout.isatty() or bool(environ.get("FORCE_COLOR")))


# -- starting ----------------------------------------------------------------------------------------------------


@contextmanager
def _witness(config: RunConfig, hosts: int) -> Iterator[str | None]:
    """Name the folder of the witness, in memory where the system has a folder there; None if no program can use it.

    The first process makes it: a program may ask for it by `overlap.run(..., survive=True)`, of which nothing is known
    here.
    """
    if not config.survive:
        if config.witness is not None:
            raise UsageError("--witness: it decides who goes on after a loss; give --survive too")
        if config.survive is False or hosts > 1 or config.transport == "mpi":
            yield None
            return
    if config.transport == "mpi":
        raise UsageError("--survive: MPI ends the whole job when a process is lost; use another --transport")
    if hosts > 1:
        with _shared_witness(config, config.node_rank or 0) as folder:
            yield str(folder)
        return
    if config.witness is not None:
        raise UsageError("--witness: on one host the launcher has the witness in memory; leave it out")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    made = Path(memory, f"witness-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        yield str(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _shared_witness(config: RunConfig, host: int) -> Iterator[Path]:
    """Take the part of this host in the folder of the witness that the user names; the last to leave removes it."""
    if config.witness is None:
        raise UsageError(
            "--survive: between hosts a folder decides who goes on: add --witness DIR, the same folder on a file "
            "system that all of them share, such as NFS"
        )
    for option in ("max_restarts", "spares"):
        if getattr(config, option):
            raise UsageError(f"--survive: on several hosts without --{option.replace('_', '-')}; leave it out")
    folder = Path(os.path.abspath(config.witness), f"witness-{_job(config)}")
    mine = folder / f"host-{host}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mine.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        raise UsageError(
            f"--witness: {folder} is of a job that runs, or has lost this host; give all hosts another --job-id, or "
            "remove the folder if that job has ended"
        ) from None
    except OSError as error:
        raise UsageError(f"--witness: {folder}: {error.strerror}; name a folder that exists on all hosts") from None
    try:
        yield folder
    finally:
        with suppress(OSError):
            mine.unlink()
            if not [*folder.glob("host-*")]:
                shutil.rmtree(folder)


def boot() -> str:
    """Return a Python program that runs this command in a new interpreter."""
    return _BOOT.format(root=str(Path(__file__).parents[2]))


@contextmanager
def _listening(endpoint: Endpoint, *, here: bool, again: bool) -> Iterator[tuple[int | None, Endpoint]]:
    """Listen for node 0 before it starts, so that a used port is reported at once; give descriptor and endpoint.

    Args:
        endpoint: Where.
        here: Whether node 0 is started here.
        again: Whether this may be a job that goes on: its earlier processes have a moment to leave the port.
    """
    if not here:
        yield None, endpoint
        return
    try:
        listener = trio.run(listener_of, endpoint, _ENDING_S if again else 0.0)
    except ListenError as error:
        raise UsageError(f"--rdzv-endpoint: {error}") from None
    with listener:
        yield listener.fileno(), (endpoint[0], listener.getsockname()[1])


async def listener_of(endpoint: Endpoint, patience_s: float) -> socket.socket:
    """Listen at an endpoint; if its port is taken, try again for so long.

    Raises:
        ListenError: Somebody else listens there, or it is no address of this machine.
    """
    until_s = trio.current_time() + patience_s
    while True:
        try:
            async with await listen(endpoint) as listening:
                return socket.socket(fileno=os.dup(listening.socket.fileno()))
        except ListenError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not taken or trio.current_time() >= until_s:
                raise
        await trio.sleep(_AGAIN_S)
