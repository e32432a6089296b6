"""Hosts, processes and ranks of `overlap run`, from its options: checks, and the size of the world."""

from __future__ import annotations

from ..config import RunConfig
from ..errors import UsageError
from ..processes.place import ProcessPlace, find_place


def with_rank_count(config: RunConfig) -> RunConfig:
    """Return the configuration with the number of ranks of the whole world in `ranks`.

    `ranks` stays None if no option sets the number, so that the program may set it.

    Raises:
        UsageError: Options contradict each other, or the launcher that has started this process.
    """
    place = find_place()
    if place is not None:
        _check_launcher(config, place)
        processes = place.processes
    else:
        _check_hosts(config)
        processes = process_count(config)
    ranks, source = config.ranks, None
    if config.ranks_per_process is not None:
        ranks, source = processes * config.ranks_per_process, "--ranks-per-process"
        if config.ranks not in (None, ranks):
            raise UsageError(
                f"--ranks {config.ranks}: {processes} processes with --ranks-per-process {config.ranks_per_process} "
                f"have {ranks}; leave one out"
            )
    elif place is None and ranks is None and processes > 1:
        ranks, source = _rank_count_of_cluster(config), "--processes"
    if ranks is not None and place is None and ranks % processes:
        processes_text = _process_count_options(config)
        raise UsageError(
            f"{ranks} ranks cannot be divided among {processes_text}; --ranks-per-process N gives each process N"
        )
    # if the user has given `ranks` itself, its source stays the same
    return config if ranks is None else config.with_changes(None if config.ranks else source, ranks=ranks)


def process_count(config: RunConfig) -> int:
    """Return the number of processes on all hosts together, of which this command starts only those of its host."""
    return (config.nnodes or 1) * (config.processes or 1)


def starts_processes(config: RunConfig) -> bool:
    """Return whether this command starts the processes of the program."""
    return (process_count(config) > 1 or bool(config.max_restarts)) and find_place() is None


def _process_count_options(config: RunConfig) -> str:
    """Return the options that set the number of processes, such as "--nnodes 2 with --processes 4", for messages."""
    hosts = f"--nnodes {config.nnodes}" if (config.nnodes or 1) > 1 else ""
    each = f"--processes {config.processes}" if config.processes else ""
    return " with ".join(filter(None, [hosts, each]))


def _rank_count_of_cluster(config: RunConfig) -> int | None:
    """Return the number of ranks of the cluster, one for each core of its devices; None if it may have any number."""
    if config.cluster in (None, "local"):
        return None
    from topology import cluster

    named = cluster(str(config.cluster))
    # a machine without devices, such as that of "local x2", may have any number of ranks
    return None if named.machine.devices is None else named.world_size


def _check_launcher(config: RunConfig, place: ProcessPlace) -> None:
    """Raise `UsageError` unless options fit the launcher of this process: number of processes, and index of this one.

    `--max-restarts` is not possible.
    """
    if config.max_restarts:
        raise UsageError(
            f"--max-restarts: {place.source} has started this process, and would have to start it again; leave it out"
        )
    hosts = config.nnodes or 1
    fits = place.processes % hosts == 0 if config.processes is None else process_count(config) == place.processes
    if config.processes is not None and config.nnodes is None:
        fits = config.processes in (place.processes, place.processes // place.nodes)
    if not fits or config.node_rank not in (None, place.process // (place.processes // hosts)):
        node = "" if config.node_rank is None else f" --node-rank {config.node_rank}"
        raise UsageError(
            f"{_process_count_options(config)}{node}: {place.source} has started this process as number "
            f"{place.process} of {place.processes}; leave out the options, or the launcher"
        )


def _check_hosts(config: RunConfig) -> None:
    """Raise `UsageError` unless `--node-rank` has `--nnodes` above it, and `--rdzv-endpoint`, by which hosts meet.

    With `--max-restarts`, each of several hosts has one process.
    """
    if config.node_rank is None:
        if (config.nnodes or 1) > 1 and config.engine is None:
            raise UsageError(
                f"--nnodes {config.nnodes}: each host starts its own processes, by this command with --node-rank I and "
                f"--rdzv-endpoint HOST:PORT too; on this host alone use --processes {config.nnodes} in its place"
            )
        return
    if config.nnodes is None or config.rdzv_endpoint is None:
        needed = {"--nnodes": config.nnodes, "--rdzv-endpoint": config.rdzv_endpoint}
        missing = " and ".join(option for option, value in needed.items() if value is None)
        raise UsageError(f"--node-rank: {missing} must be given too, the same for all hosts")
    if config.node_rank >= config.nnodes:
        raise UsageError(f"--node-rank: expected less than --nnodes {config.nnodes}, got {config.node_rank}")
    if config.max_restarts and (config.processes or 1) > 1 and config.nnodes > 1:
        raise UsageError("--processes: --max-restarts on several hosts needs one process on each; leave one out")
