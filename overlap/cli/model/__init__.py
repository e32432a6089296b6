"""`overlap model NAME`: predicts a training step from a model's configuration and a layout."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from time import perf_counter
from typing import Any

from topology import Cluster

from ... import Virtual
from ...config import RunConfig
from ...errors import UsageError
from ...launch.report import EXIT_FAILED, EXIT_INTERRUPTED
from ...notice import notify, write_stderr
from ...parallel.schedules import FAMILIES
from ...planning import Layout, Model, estimate, known, load
from ...planning.device import Device
from ...planning.layout import BUCKET_BYTES, CHECKPOINTING, OPERATIONS, ORDERS
from ...planning.search import FREE, Candidate, SearchResult, candidates, search
from ...settings import Option
from ...timeline.recording import DEFAULT_CAPACITY
from ...units import count, integer, number, parse_bytes, switch
from ..options import add_options, check_width, shared_option, values
from ..output import output_path, print_result
from ..parser import HelpAll, Parser
from ..simulate.setting import PARAMETERS, check_setting, revise_config
from .page import describe, page, search_page

EFFICIENCY = 0.5
"""Share of the peak that computes reach by default, as in good implementations of large models."""

_WITHIN_S = 60.0
"""Seconds of a search by default."""

_SEARCHED_BATCH = 1024
"""Samples of a step in a search by default: only layouts with equal batches can be compared."""

# Computes of a layer for a microbatch, at least: attention and perceptron, forward and backward.
_LEAST_COMPUTES = 4

_FIGURES = {
    name: Option(read=count, metavar="N", help=f"{figure}; default: the model's")
    for name, figure in {
        "layers": "layers",
        "hidden": "numbers of a token between layers",
        "heads": "attention heads",
        "kv_heads": "heads of keys and values",
        "ffn": "numbers of a token inside the feed-forward part",
        "vocabulary": "different tokens",
        "sequence": "tokens of a sample",
        "experts": "experts of a layer",
        "top_k": "experts that see each token",
        "window": "tokens that a token meets at most, itself and earlier ones",
        "mtp_layers": "further layers that predict further tokens",
    }.items()
}
_LAYOUT = {
    "tp": Option(read=count, metavar="N", help="ranks that share each matrix"),
    "pp": Option(read=count, metavar="N", help="ranks that share the layers"),
    "dp": Option(read=count, metavar="N", help="ranks that share the samples; default: all that are left"),
    "cp": Option(read=count, metavar="N", help="ranks that share a sequence, by ring attention"),
    "ep": Option(read=count, metavar="N", help="ranks of dp that share the experts"),
    "global_batch": Option(
        read=count, metavar="N", help="samples of a step; default: 8 microbatches for each stage"
    ),
    "micro_batch": Option(read=count, metavar="N", help="samples that pass the pipeline together"),
    "chunks": shared_option("chunks"),
    "schedule": Option(read=str, metavar="NAME", help=f"of the pipeline: {', '.join(FAMILIES)}"),
    "zero": Option(read=integer, metavar="N", help="0 to 3; 3 is FSDP; default: 1"),
    "checkpointing": Option(
        read=str, metavar="WHAT",
        help=f"{', '.join(CHECKPOINTING)} (default), or some of {', '.join(OPERATIONS)} joined by +",
    ),
    "async_tp": Option(
        read=switch, help="exchanges of tp lie under the products they belong to, piece by piece",
        off="they lie between the halves of a layer (default)",
    ),
    "replicate": Option(
        read=count, metavar="N", help="groups of ranks of dp that each share a whole copy (HSDP); default: 1"
    ),
    "overlap_gather": Option(
        read=switch, help="new weights are gathered under the next step (ZeRO-1 and 2)",
        off="at the end of their step (default)",
    ),
    "sequence_parallel": Option(
        read=switch, help="ranks of tp share the activations between the halves of a layer (default)",
        off="each of them holds all of these",
    ),
    "bucket_bytes": Option(
        read=partial(parse_bytes, argument="bucket_bytes"), metavar="SIZE",
        help=f"gradients that are reduced together; default: {BUCKET_BYTES >> 20}MiB",
    ),
    "order": Option(read=str, metavar="A.B.C", help=f"axes, neighbours last: {', '.join(ORDERS)}"),
}  # fmt: skip
_ANSWER = {
    "search": Option(read=str, metavar="NAME,...", help=f"search for the best of these: {', '.join(FREE)}"),
    "within": Option(read=number, metavar="S", help="seconds of a search; default: 60, and one simulation in any case"),
}
# Parameters of simulations that a layout does not imply, and that ranks which behave alike have.
_ASSUMED = {
    name: PARAMETERS[name]
    for name in (
        "cluster", "nodes", "lnc", "algorithm", "dtype", "efficiency", "memory_efficiency", "profile", "peer_direct",
        "slow_compute", "slow_comm",
    )
}  # fmt: skip

_DESCRIPTION = """\
Predict a training step of a language model from its configuration and a layout on a modelled cluster: its time, what of
it is exposed, and the memory that it needs. NAME is a model that comes with the package, or a file: .toml, or a
config.json of Hugging Face. An option of the layout that is not given has its default.
"""

_EPILOG = f"""\
examples:
  overlap model llama-70b --tp 8 --pp 4 --cluster "trn2.48xlarge x16"
  overlap model llama-8b --search tp,pp,dp,bucket_bytes,order --cluster "trn2.48xlarge x2"

models: {", ".join(known())}
"""


def fill(parser: Parser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--help-all", action=HelpAll)
    parser.add_argument("model", nargs="?", metavar="NAME", help="model; without one, figures of your own say all")
    add_options(parser, {name: shared_option(name) for name in ("trace", "json", "json_file", "width")})
    add_options(parser, _ANSWER, usual=("search",))
    add_options(
        parser.add_argument_group("the cluster and what is assumed of it"), _ASSUMED, usual=("cluster", "nodes")
    )
    layout = parser.add_argument_group("the layout")
    add_options(layout, _LAYOUT, usual=("tp", "pp", "dp", "zero", "global_batch"))
    add_options(parser.add_argument_group("figures of the model"), _FIGURES, usual=())


def main(args: argparse.Namespace) -> int:
    """Predict the step, print it, and return the exit code.

    Raises:
        UsageError: If a value is impossible; names option or file, and what was expected.
        TopologyError: If there is no such cluster.
    """
    check_width(args.width)
    args.json_file, args.trace = output_path(args.json_file, option="--json-file"), output_path(args.trace)
    setting = values(args, _ASSUMED)
    cluster, virtual, algorithm = _simulated_machine(setting)
    # Shares of the peak that the user sets replace the measured rates of the device.
    has_own_rates = {"efficiency", "memory_efficiency"} & set(setting)
    device = None if has_own_rates else Device.of(cluster)
    model = load(args.model, values(args, _FIGURES))
    names = _searched_names(args)
    layout = _read_layout(args, cluster, virtual.dtype, names)
    if args.within is not None and (args.search is None or not args.within > 0):
        raise UsageError(f"--within: expected a positive number, and --search next to it, got {args.within!r}")
    _check_size(model, layout, cluster, searched=bool(names))
    result = SearchResult() if names else None
    begun_s, interrupted = perf_counter(), False
    if result is None:
        step = estimate(model, layout, cluster, virtual, algorithm=algorithm, device=device)
    else:
        within_s = _WITHIN_S if args.within is None else args.within
        interrupted = _search(result, model, layout, names, cluster, virtual, algorithm, device, within_s)
        if result.best is None:
            return EXIT_INTERRUPTED
        step = result.best
    wall_s = perf_counter() - begun_s
    if args.trace is not None and result is None and step.timeline is not None:
        from ...timeline import write_trace

        write_trace(step.timeline, args.trace)
    searched = None if result is None else (names, result)

    def lines() -> list[str]:
        """Return the printed page: the search, if there was one, and the predicted step."""
        from ..console import Console

        width = Console(width=args.width).width
        return [*(search_page(*searched, width=width) if searched else []), *page(step, wall_s, width)]

    is_written = print_result(args, lambda: describe(step, searched), lines)
    return EXIT_INTERRUPTED if interrupted else 0 if is_written else EXIT_FAILED


def _simulated_machine(setting: dict[str, Any]) -> tuple[Cluster, Virtual, str | None]:
    """Return the cluster, the assumptions, and the only algorithm, if there is one."""
    if "cluster" not in setting:
        raise UsageError('--cluster: expected a cluster, such as "trn2.48xlarge x16"')
    request = revise_config(check_setting({"efficiency": EFFICIENCY, **setting}), RunConfig())
    assert isinstance(request.cluster, Cluster)
    assert request.virtual is not None
    return request.cluster, request.virtual, request.algorithm


def _searched_names(args: argparse.Namespace) -> list[str]:
    """Return the names to search for, with `dp` unless it is given: it gets the ranks that the others leave."""
    if args.search is None:
        return []
    names = [name.strip() for name in args.search.split(",")]
    if not all(names):
        raise UsageError(f"--search: expected names, such as tp,pp,dp, got {args.search!r}")
    return names if args.dp is not None or "dp" in names else [*names, "dp"]


def _read_layout(args: argparse.Namespace, cluster: Cluster, dtype: str, names: list[str]) -> Layout:
    """Return the layout that the options ask for: `dp` and the global batch are chosen where they are not given."""
    options = values(args, _LAYOUT)
    if twice := [name for name in names if name in options]:
        raise UsageError(f"--search: {twice[0]} is given, and cannot be searched for too; leave one out")
    if (schedule := options.get("schedule")) in FAMILIES:
        options.setdefault("chunks", FAMILIES[schedule].chunks or 2)
    shared = options.get("tp", 1) * options.get("pp", 1) * options.get("cp", 1)
    if names:
        options.setdefault("global_batch", _SEARCHED_BATCH)
        return Layout(dtype=dtype, **options)
    if "dp" not in options:
        if cluster.world_size % shared:
            raise UsageError(
                f"tp x pp x cp: expected a divisor of the {cluster.world_size} ranks of {cluster.name}, got {shared}"
            )
        options["dp"] = cluster.world_size // shared
    options.setdefault("global_batch", 8 * options.get("pp", 1) * options["dp"] * options.get("micro_batch", 1))
    return Layout(dtype=dtype, **options)


def _check_size(model: Model, layout: Layout, cluster: Cluster, *, searched: bool) -> None:
    """Raise an error for a step with more computes on a rank than can be recorded, before it is built."""
    shared, batches = (cluster.world_size, 1) if searched else (layout.pp, min(layout.microbatches, 2 * layout.pp + 1))
    if layout.chunks > 1 and not searched:  # those are all simulated, see `estimate`
        batches = layout.microbatches
    computes = _LEAST_COMPUTES * -(-model.layers // shared) * batches
    if computes > DEFAULT_CAPACITY:
        raise UsageError(
            f"--layers: a rank of {model.name} with {model.layers} layers has {computes} computes or more in the step "
            f"that is simulated; expected at most {DEFAULT_CAPACITY}: take fewer, more --pp, or a larger --micro-batch"
        )


def _search(
    result: SearchResult,
    model: Model,
    like: Layout,
    names: list[str],
    cluster: Cluster,
    virtual: Virtual,
    algorithm: str | None,
    device: Device | None,
    within_s: float,
) -> bool:
    """Search for the best layout, and return whether Ctrl-C came before the end."""

    def print_candidate(number: int, candidate: Candidate) -> None:
        """Print the next layout and the best one so far, if stderr is a terminal."""
        best = f"; best so far {result.best.step_s * 1e3:.1f} ms: {result.best.layout}" if result.best else ""
        if sys.stderr.isatty():
            write_stderr(f"{number + 1}: {candidate.layout}, at least {candidate.bound_s * 1e3:.1f} ms{best}\n")

    begun_s = perf_counter()
    try:
        ordered = candidates(model, like, names, cluster, virtual, result, device=device)
        search(
            model,
            ordered,
            cluster,
            virtual,
            result,
            algorithm=algorithm,
            on_candidate=print_candidate,
            device=device,
            within_s=max(0.0, within_s - (perf_counter() - begun_s)),
        )
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        notify(f"interrupted; {len(result.simulated)} layouts were simulated")
        return True
    if result.best is None:
        most = max(result.left_out.items(), key=lambda each: len(each[1]), default=("nothing to try", []))
        raise UsageError(
            f"--search: none of {result.tried} layouts fits {model.name} on {cluster.name}; most often: {most[0]}; "
            "take more nodes, or a smaller model"
        )
    return False


def _is_interrupt(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C, or a group that contains one."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_interrupt, error.exceptions))
    return isinstance(error, KeyboardInterrupt)
