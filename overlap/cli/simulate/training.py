"""`overlap simulate --model`: a training step from a model's configuration and a layout, instead of a program."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import Any

from topology import Cluster

from ...config import RunConfig
from ...errors import UsageError
from ...notice import notify, say
from ...parallel.schedules import FAMILIES
from ...planning import Layout, Model, estimate, known, load
from ...planning.estimates import Estimate
from ...planning.layout import BUCKET_BYTES, CHECKPOINTING, ORDERS
from ...planning.search import FREE, Candidate, Found, candidates, search
from ...planning.sensitivity import Sensitivity, sensitivities
from ...units import parse_bytes
from ..failure import EXIT_FAILED, EXIT_INTERRUPTED
from ..options import as_argument, count
from ..output import written
from .setting import Setting
from .training_json import described
from .training_page import page, search_page

EFFICIENCY = 0.5
"""Share of the peak that computes reach if nobody says so: what good implementations of large models do."""

_FIGURES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence", "experts", "top_k")
_DEGREES = {
    "tp": "ranks that share each matrix",
    "pp": "ranks that share the layers",
    "dp": "ranks that share the samples; default: all that are left",
    "cp": "ranks that share a sequence, by ring attention",
    "ep": "ranks of dp that share the experts",
    "global_batch": "samples of a step; default: 8 microbatches for each stage",
    "micro_batch": "samples that pass the pipeline together",
    "chunks": "stages on each rank, with --schedule interleaved-1f1b; default: 2",
}
# What a layout says by itself, or what ranks that behave alike do not have.
_ELSEWHERE = ("alike", "shapes_only", "ranks", "faults", "seed", "jitter", "straggler_share", "straggler_factor",
              "slow_wire_share", "slow_wire_factor")  # fmt: skip


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training step."""
    of = parser.add_argument_group(
        "a model's training step instead of a program", "An option of the layout that is not given has its default."
    )
    of.add_argument(
        "--model", metavar="NAME", help=f"{', '.join(known())}; or a file: .toml, or a config.json of Hugging Face"
    )
    of.add_argument("--on", dest="on", metavar="NAME", help="the same as --cluster")
    for name in _FIGURES:
        of.add_argument(_flag(name), dest=f"model_{name}", type=count, metavar="N", help=f"another {name} of the model")
    for name, help in _DEGREES.items():
        of.add_argument(_flag(name), dest=f"layout_{name}", type=count, metavar="N", help=help)
    of.add_argument(
        "--schedule", dest="layout_schedule", metavar="NAME", help=f"of the pipeline: {', '.join(FAMILIES)}"
    )
    of.add_argument("--zero", dest="layout_zero", type=int, metavar="N", help="0 to 3; 3 is FSDP; default: 1")
    of.add_argument(
        "--checkpointing", dest="layout_checkpointing", metavar="WHAT", help=f"{', '.join(CHECKPOINTING)} (default)"
    )
    of.add_argument(
        "--no-sequence-parallel", dest="layout_sequence_parallel", action="store_false", default=None,
        help="ranks of tp all hold what is between the halves of a layer",
    )  # fmt: skip
    size = as_argument(partial(parse_bytes, argument="bucket_bytes"))
    of.add_argument(
        "--bucket-bytes", dest="layout_bucket_bytes", type=size, metavar="SIZE",
        help=f"gradients that are reduced together; default: {BUCKET_BYTES >> 20}MiB",
    )  # fmt: skip
    of.add_argument("--order", dest="layout_order", metavar="A.B.C", help=f"axes, neighbours last: {', '.join(ORDERS)}")
    of.add_argument(
        "--imbalance", dest="layout_imbalance", type=float, metavar="F",
        help="tokens of the busiest rank of experts over the mean; default: 1",
    )  # fmt: skip
    of.add_argument("--price", type=float, metavar="P", help="of a node and hour, for the cost of a sample")
    of.add_argument(
        "--sensitivity", action="store_true", help="simulate the step with other figures of the machine too"
    )
    of.add_argument("--best", metavar="NAME,...", help=f"search for the best of these: {', '.join(FREE)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def asks_for_training(args: argparse.Namespace) -> bool:
    """Return whether a model is to be trained.

    Raises:
        UsageError: If options of a model are given without one.
    """
    figures = [name for name in _FIGURES if getattr(args, f"model_{name}") is not None]
    if args.model is not None or figures:
        return True
    for option in ("best", "price", "sensitivity", *(f"layout_{name}" for name in _layout_names())):
        if getattr(args, option):
            raise UsageError(f"{_flag(option.removeprefix('layout_'))}: only with --model")
    if args.on is not None:
        args.cluster = args.on
    return False


def _layout_names() -> list[str]:
    return [field.name for field in fields(Layout) if field.name != "dtype"]


def simulate_training(args: argparse.Namespace, values: dict[str, Any]) -> int:
    """Predict the step, print it, and return the exit code.

    Args:
        args: Of the command line.
        values: Of `setting.given`.

    Raises:
        UsageError: If something cannot be meant; names option or file, and what was expected.
        TopologyError: If there is no such cluster.
    """
    request = _request(args, values)
    cluster, virtual = request.cluster, request.virtual
    assert isinstance(cluster, Cluster)
    assert virtual is not None
    told = {name: getattr(args, f"model_{name}") for name in _FIGURES}
    model = load(args.model, {name: value for name, value in told.items() if value is not None})
    names = _names(args)
    layout = _layout(args, cluster, virtual.dtype, names)
    if args.price is not None and not 0 < args.price < float("inf"):
        raise UsageError(f"--price: expected a positive number, got {args.price!r}")
    if names:
        return _search(args, model, layout, names, request)
    begun_s = perf_counter()
    one = estimate(model, layout, cluster, virtual, algorithm=request.algorithm)
    wall_s = perf_counter() - begun_s
    if args.trace is not None:
        from ...timeline import write_trace

        write_trace(one.timeline, args.trace)
    moved, interrupted = _moved(args, one, request)
    return _told(args, one, moved, wall_s, None, interrupted=interrupted)


def _request(args: argparse.Namespace, values: dict[str, Any]) -> RunConfig:
    if args.script is not None or args.module is not None:
        raise UsageError(f"--model: a model needs no program, got {args.script or '-m'}")
    if args.sweep:
        raise UsageError("--sweep: of a model, --best searches")
    if args.csv is not None:
        raise UsageError("--csv: only a --sweep has rows")
    if args.on is not None and args.cluster is not None:
        raise UsageError("--on: the same as --cluster; give one of them")
    asked = {**values, **({"cluster": args.on} if args.on is not None else {})}
    if "cluster" not in asked:
        raise UsageError('--on: expected a cluster, such as "trn2.48xlarge x16"')
    for name in _ELSEWHERE:
        if name in asked:
            raise UsageError(f"{_flag(name)}: of a model's step all ranks of a stage run alike, and --on says how many")
    return Setting.of({"efficiency": EFFICIENCY, **asked}).revise(RunConfig())


def _names(args: argparse.Namespace) -> list[str]:
    """Return what is searched for; `dp`, unless it is given, is what the others leave."""
    if args.best is None:
        return []
    names = [name.strip() for name in args.best.split(",")]
    if not all(names):
        raise UsageError(f"--best: expected names, such as tp,pp,dp, got {args.best!r}")
    return names if args.layout_dp is not None or "dp" in names else [*names, "dp"]


def _layout(args: argparse.Namespace, cluster: Cluster, dtype: str, names: list[str]) -> Layout:
    given = {name: value for name in _layout_names() if (value := getattr(args, f"layout_{name}")) is not None}
    if twice := [name for name in names if name in given]:
        raise UsageError(f"--best: {twice[0]} is given, and cannot be searched for too")
    if (schedule := given.get("schedule")) in FAMILIES:
        given.setdefault("chunks", FAMILIES[schedule].chunks or 2)
    shared = given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
    if names:
        given.setdefault("global_batch", _BATCH)
        return Layout(dtype=dtype, **given)
    if "dp" not in given:
        if cluster.world_size % shared:
            raise UsageError(
                f"tp x pp x cp: expected a divisor of the {cluster.world_size} ranks of {cluster.name}, got {shared}"
            )
        given["dp"] = cluster.world_size // shared
    given.setdefault("global_batch", 8 * given.get("pp", 1) * given["dp"] * given.get("micro_batch", 1))
    return Layout(dtype=dtype, **given)


_BATCH = 1024
"""Samples of a step in a search, if nobody says so: layouts can only be compared with the same."""


def _search(args: argparse.Namespace, model: Model, like: Layout, names: list[str], request: RunConfig) -> int:
    found, begun_s = Found(), perf_counter()
    cluster, virtual = request.cluster, request.virtual
    assert isinstance(cluster, Cluster)
    assert virtual is not None
    interrupted = False

    def told(number: int, candidate: Candidate) -> None:
        best = f"; best so far {found.best.step_s * 1e3:.1f} ms: {found.best.layout}" if found.best else ""
        if sys.stderr.isatty():
            say(f"{number + 1}: {candidate.layout}, at least {candidate.bound_s * 1e3:.1f} ms{best}\n")

    try:
        ordered = candidates(model, like, names, cluster, virtual, found)
        search(model, ordered, cluster, virtual, found, algorithm=request.algorithm, told=told)
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        interrupted = True
        notify(f"interrupted; {len(found.simulated)} layouts were simulated")
    wall_s = perf_counter() - begun_s
    if found.best is None:
        if interrupted:
            return EXIT_INTERRUPTED
        most = max(found.left_out.items(), key=lambda each: len(each[1]), default=("nothing to try", []))
        raise UsageError(
            f"--best: none of {found.tried} layouts fits {model.name} on {cluster.name}; most often: {most[0]}"
        )
    moved, again = ([], False) if interrupted else _moved(args, found.best, request)
    return _told(args, found.best, moved, wall_s, (names, found), interrupted=interrupted or again)


def _is_interrupt(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_interrupt, error.exceptions))
    return isinstance(error, KeyboardInterrupt)


def _moved(args: argparse.Namespace, one: Estimate, request: RunConfig) -> tuple[list[Sensitivity], bool]:
    """Return the sensitivities that were asked for, and whether Ctrl-C came before the last."""
    rows: list[Sensitivity] = []
    if not args.sensitivity:
        return rows, False
    try:
        rows.extend(sensitivities(one, algorithm=request.algorithm))
    except BaseException as error:
        if not _is_interrupt(error):
            raise
        return rows, True
    return rows, False


def _told(
    args: argparse.Namespace,
    one: Estimate,
    moved: list[Sensitivity],
    wall_s: float,
    searched: tuple[list[str], Found] | None,
    *,
    interrupted: bool,
) -> int:
    """Print what was found, as page or JSON."""
    told = True
    if args.json is not None:
        text = json.dumps(described(one, moved, args.price, searched), indent=2, sort_keys=True) + "\n"
        if args.json == "-":
            print(text, end="")
        else:
            told = written(text, args.json, option="--json")
    if args.json != "-":
        from ..console import Console

        width = Console(width=args.width).width
        lines = search_page(*searched, width=width) if searched else []
        print("\n".join([*lines, *page(one, moved, args.price, wall_s, width=width)]), flush=True)
    return EXIT_INTERRUPTED if interrupted else 0 if told else EXIT_FAILED
