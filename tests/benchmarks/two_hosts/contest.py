"""All figures of two hosts: what a step is made of, how it compares, and what a second link brings."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

import numpy as np

from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times, slowest_times
from overlap.units import format_bytes, format_ns

from ..figures import Figure, time_of
from .network import Host, HostsUnavailableError, two_hosts
from .perceptron import BATCH, LAYERS, WIDTH
from .programs import all_reduces, ddp_steps, our_steps, raw_exchanges, torch_all_reduces
from .simulated import real_and_virtual_ns

BITS_PER_S = 10**9

DEFAULT_MIB = 25  # of PyTorch's buckets
BUCKETS_MIB = (1, 2, 4, 8, 16, DEFAULT_MIB)

POSSIBLE_AIM = 1 / 1.05  # within 5 % of what backward order makes possible
WITHOUT_BARRIER_AIM_NS = 300e6
DEFAULT_AIM = 1.5
BEST_AIM = 1.2
LAYER_AIM = 1 / 1.03
RAW_AIM = 1 / 1.05
TRUTH_AIM = 0.97
GLOO_AIM = 1
RAILS_AIM = 1.9

ALONE_BYTES = (1 << 20, 4 << 20, 16 << 20)
TORCH_BYTES = (64 << 10, *ALONE_BYTES)
RAILS_BYTES = (4 << 20, 64 << 20)

_TEXTS = {
    "head": "forward, and backward of one layer",
    "compute": "compute of a step",
    "communicate": "all-reduce of all gradients",
    "one_after_the_other": "step, one after the other",
    "overlapped": "step, overlapped",
    "without_barrier": "step, overlapped, without a barrier",
    "with_layer": "step, with DataParallel",
}


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure one after the other; text is a remark, such as that a tool is missing."""
    try:
        with two_hosts(links=2, bits_per_s=BITS_PER_S) as hosts:
            yield (
                f"two network namespaces, links of {BITS_PER_S // 10**9} Gbit/s; {LAYERS} layers of {WIDTH} x {WIDTH}, "
                f"batch {BATCH} a rank, float32, one rank on each"
            )
            alone = {nbytes: _all_reduce(hosts, nbytes, sampling) for nbytes in ALONE_BYTES}
            yield from _alone(hosts, alone, sampling)
            yield from _steps(hosts, sampling)
            yield _truth(*real_and_virtual_ns(hosts, {nbytes: row.times for nbytes, row in alone.items()}))
            for nbytes in RAILS_BYTES:
                yield from _rails(hosts, nbytes, sampling)
    except HostsUnavailableError as reason:
        yield str(reason)


def _steps(hosts: Sequence[Host], sampling: Sampling) -> Iterator[Figure | str]:
    told = our_steps(hosts, sampling)
    times = {name: slowest_times(samples, batch=1) for name, samples in told["samples_ns"].items()}
    for name, text in _TEXTS.items():
        aim_ns = WITHOUT_BARRIER_AIM_NS if name == "without_barrier" else None
        yield _time(name, text, times[name], aim_ns, wrong=told["wrong"])
    yield from _compared(times)
    if find_spec("torch") is None:
        yield "torch is not installed: pip install torch"
        return
    yield from _beside_gloo(hosts, sampling)
    ddp = ddp_steps(hosts, sampling, BUCKETS_MIB)
    yield f"DDP is DistributedDataParallel of {ddp['version']} on gloo"
    yield from _against(
        times["without_barrier"], {float(size): slowest_times(s, batch=1) for size, s in ddp["samples_ns"].items()}
    )


def _beside_gloo(hosts: Sequence[Host], sampling: Sampling) -> Iterator[Figure]:
    """Compare single all-reduces of PyTorch, in turn on both backends."""
    for nbytes, samples in zip(TORCH_BYTES, torch_all_reduces(hosts, sampling, TORCH_BYTES), strict=True):
        gloo, ours = (Times.of_samples(samples[name]) for name in ("gloo", "overlap"))
        name = f"torch/{nbytes >> 10}"
        yield _time(name, f"all_reduce of PyTorch, {format_bytes(nbytes)}", ours)
        yield _ratio(
            f"{name}/gloo", f"as fast as on gloo ({format_ns(gloo.median_ns)})", gloo.median_ns, ours, GLOO_AIM
        )


def _compared(times: Mapping[str, Times]) -> Iterator[Figure]:
    """Compare a step with its parts; what backward order makes possible is a head and then nothing but messages."""
    step, parts = times["overlapped"], times["one_after_the_other"]
    possible_ns = times["head"].median_ns + times["communicate"].median_ns
    yield _ratio("possible", f"as fast as possible ({format_ns(possible_ns)})", possible_ns, step, POSSIBLE_AIM)
    free = times["without_barrier"]
    text = f"as fast as by futures alone ({format_ns(free.median_ns)})"
    yield _ratio("layer", text, free.median_ns, times["with_layer"], LAYER_AIM)
    yield _ratio("gain", f"as fast as one after the other ({format_ns(parts.median_ns)})", parts.median_ns, step, None)


def _against(step: Times, by_bucket: Mapping[float, Times]) -> Iterator[Figure]:
    default_ns = by_bucket[DEFAULT_MIB].median_ns
    best, times = min(by_bucket.items(), key=lambda item: item[1].median_ns)
    yield _ratio("ddp", f"as fast as DDP with its defaults ({format_ns(default_ns)})", default_ns, step, DEFAULT_AIM)
    text = f"as fast as DDP with its best buckets, {best:g} MiB ({format_ns(times.median_ns)})"
    yield _ratio("ddp_best", text, times.median_ns, step, BEST_AIM)


def _alone(hosts: Sequence[Host], alone: Mapping[int, Result], sampling: Sampling) -> Iterator[Figure]:
    raw = raw_exchanges(hosts, sampling, list(alone))
    for nbytes, row in alone.items():
        name, text = f"alone/{nbytes >> 20}", f"all_reduce, {format_bytes(nbytes)}, alone"
        yield _time(name, text, row.times, wrong=row.wrong or 0)
        raw_ns = Times.of_samples(raw[str(nbytes)]).median_ns
        yield _ratio(f"{name}/raw", f"as fast as a bare socket ({format_ns(raw_ns)})", raw_ns, row.times, RAW_AIM)


def _truth(real_ns: float, virtual_ns: float) -> Figure:
    near = min(real_ns, virtual_ns) / max(real_ns, virtual_ns)
    text = f"  the virtual clock ({format_ns(virtual_ns)}): as long as {format_ns(real_ns)}"
    times = Times.of_samples([real_ns])
    return Figure(name="two_hosts/truth", text=text, value=near, unit="ratio", aim=TRUTH_AIM, times=times)


def _rails(hosts: Sequence[Host], nbytes: int, sampling: Sampling) -> Iterator[Figure]:
    one, two = (_all_reduce(hosts, nbytes, sampling, rails) for rails in (1, 2))
    for rails, row in ((1, one), (2, two)):
        text = f"all_reduce, {format_bytes(nbytes)}, {rails} link{'s' * (rails > 1)}"
        yield _time(f"rails/{nbytes >> 20}/{rails}", text, row.times, wrong=row.wrong or 0)
    yield _ratio(f"rails/{nbytes >> 20}", "two links: as fast as one", one.times.median_ns, two.times, RAILS_AIM)


def _all_reduce(hosts: Sequence[Host], nbytes: int, sampling: Sampling, rails: int = 1) -> Result:
    dtype = np.dtype(np.float32)
    case = Case(operation=NAMES["all_reduce"], ranks=len(hosts), count=nbytes // 4, dtype=dtype, in_place=True)
    [row] = all_reduces(hosts, [case], sampling, rails=rails)
    return row


def _time(name: str, text: str, times: Times, aim_ns: float | None = None, *, wrong: int = 0) -> Figure:
    return time_of(f"two_hosts/{name}", text, times, aim_ns, wrong=wrong)


def _ratio(name: str, text: str, other_ns: float, times: Times, aim: float | None) -> Figure:
    value = other_ns / times.median_ns
    return Figure(name=f"two_hosts/{name}", text=f"  {text}", value=value, unit="ratio", aim=aim, times=times)
