"""Advice on profiles: changes to the program, each with evidence, a call site, and bounds of its gain.

The gain of a change is the time by which a step gets shorter if the whole cause is gone and the rest stays as it is: a
range over the recorded steps, with an upper bound (see `bounds`). It is given only if it exceeds the usual difference
between steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from ..units import format_bytes, format_ns
from . import causes
from .bounds import compute_gain
from .facts import Facts
from .rank import TINY_KERNEL_NS
from .ranks import LateRank, Traffic
from .report import Advice
from .sites import BACKWARD, CallSite, SiteCost, list_operators, majority_site, sum_times_by_name

MAX_ADVICE = 5
"""Pieces of advice at most."""
WORTH_SHARE = 0.05
"""Part of a step that a cause must cost to be worth a change; twice that if no gain is known."""
MIN_STEPS = 2
"""Steps from which a range of gains can be computed."""
GC_WITHOUT_PROFILER = 0.5
"""Part of a recorded garbage collection that remains, at least, without the profiler and its objects.

Measured with torch and 300,000 lists: 115 of 165 ms.
"""
SMALL_BYTES, SMALL_NS = 64 * 1024, 15_000
"""A collective with fewer bytes, or a shorter time, is mostly latency."""
LARGE_BYTES, SLOW_SHARE = 16 << 20, 0.1
"""A collective of this many bytes should use the bandwidth of its links; below this part of it, it is slow."""
MOSTLY_GRAPHS = 0.5
"""If graphs launch at least this part of the kernels, a step counts as run by graphs."""
LOOP_SHARE = 0.2
"""Part of a step that a loop of small operators must take to be named."""
MORE_THAN_OTHERS = 1.5
"""A rank has more to do than others if its time is longer than theirs by this factor."""
KERNEL_BOUND, SOFTMAX_SHARE, ELEMENTWISE_SHARE = 0.6, 0.2, 0.4
"""Kernels are judged if they take the first part of a step; the parts of kernel time that are worth advice."""
_UPDATE = re.compile(r"AccumulateGrad|^Optimizer\.| Optimizer\.|_foreach_")
SHORT_OPERATOR_NS, MANY_OPERATORS = 50_000, 500
"""Operators on a host shorter than this, at least this many in one function, are taken to be called in a loop."""
MANY_CALLS = 50
"""If a step has this many small collectives, they should be joined."""


def choose_advice(facts: Facts) -> list[Advice]:
    """Return at most `MAX_ADVICE` changes, one for each cause: what comes before all else, then the largest cause."""
    by_cause = {"first": facts.first} if facts.first else {}
    items = [each for rule in (_RULES if facts.profile else (_advise_timeline,)) for each in rule(facts)]
    for ns, item in sorted(items, key=lambda each: -each[0]):
        # advice without a gain needs a larger cause, unless too few steps show any gain
        has_gain = item.gain_least_ns is not None or item.gain_ns is not None
        if has_gain or ns >= 2 * WORTH_SHARE * facts.step_ns or len(facts.costs) < MIN_STEPS:
            by_cause.setdefault(item.cause, item)  # of several changes for one cause, the one that is worth most
    return [*by_cause.values()][:MAX_ADVICE]


def gain_bounds(facts: Facts, *names: str) -> tuple[int | None, int | None, str]:
    """Compute by how much steps get shorter without some causes, if the rest stays as it is.

    Args:
        facts: The facts.
        names: The causes.

    Returns:
        The least and the largest gain over the recorded steps in nanoseconds, and both as text. If the gain is
        unknown, None, None and the reason.
    """
    gains = [compute_gain([*ranks.values()], *names) for ranks in facts.costs.values()]
    stays_ns, most_ns = [each.stays_ns for each in gains], max(each.most_ns for each in gains)
    if causes.GC in names:
        # The profiler itself makes collections longer: without it, the gain may be smaller.
        stays_ns += [round(GC_WITHOUT_PROFILER * ns) for ns in stays_ns]
    least_ns, largest_ns = min(stays_ns), max(stays_ns)
    walls_ns = [sum(facts.mean_costs_of(step).values()) for step in facts.costs]
    spread_ns = max(walls_ns) - min(walls_ns)
    if len(walls_ns) < MIN_STEPS:
        return None, None, f"not given: one step is recorded, and it has {format_ns(stays_ns[0])} of it"
    # Chance could give such a gain as well.
    if 2 * least_ns <= spread_ns:
        return None, None, f"not given: steps differ by {format_ns(spread_ns)} anyway"
    text = f"{format_ns(least_ns)} to {format_ns(largest_ns)} a step (over {len(walls_ns)} steps) if the rest stays"
    return least_ns, largest_ns, f"{text}, at most {format_ns(most_ns)}"


AdviceItems = Iterator[tuple[float, Advice]]
"""Pieces of advice, each with the nanoseconds of its cause in the shown step, by which they are sorted."""
Rule = Callable[[Facts], AdviceItems]


def _advice_with_gain(
    facts: Facts, names: Sequence[str], change: str, site: str, evidence: str
) -> tuple[float, Advice]:
    """Return the time of some causes in the shown step, and advice with their common gain, under the first cause."""
    least, most, text = gain_bounds(facts, *names)
    return facts.cost_ns(*names), Advice(
        cause=names[0], change=change, place=site, evidence=evidence, gain_least_ns=least, gain_most_ns=most,
        gain_text=text,
    )  # fmt: skip


def _is_worth_changing(facts: Facts, *names: str) -> bool:
    """Whether some causes (`names`) together cost enough of the shown step to be worth a change."""
    return facts.cost_ns(*names) >= WORTH_SHARE * facts.step_ns


def top_site(facts: Facts, cause: str) -> str:
    """Return the call site with the most time of a cause, all calls of one operator together, or "" if unknown."""
    return next((each.text() for each in facts.site_times(cause)), "")


def _costliest_site(facts: Facts, cause: str) -> CallSite:
    """Return the single call site with the most time of a cause, or an empty one if none is known."""
    costs = facts.sites.get(cause)
    return costs[0].site if costs else CallSite()  # `Facts.sites` has the most expensive first


_AWAIT_LATE = "issue first and await at the end of the step: keep the futures in a list"
_BEGIN_EARLY = "issue it earlier, in smaller parts, or send fewer bytes: no later compute could hide it"
_OWN_CHANGES = {
    causes.WAIT: "share its work out evenly, or look for what slows its host",
    causes.WIRE: _AWAIT_LATE,
    causes.COMM: _AWAIT_LATE,
    causes.LOOP: "call it in a thread, trio.to_thread.run_sync in a nursery, and await that late",
    causes.COPY: "copy in parallel with computes, on another stream of the device",
    causes.QUEUE: "if more operations than its window= are open, issue some on another stream, rank.stream(...)",
}
"""Changes of a program that uses overlap, by cause."""
_TORCH_CHANGES = {
    causes.WIRE: "issue first and wait at the end of the step: async_op=True, and keep the works in a list",
    causes.QUEUE: "issue fewer and larger operations",
}
"""Changes of a program of PyTorch with the backend of overlap, where they are other ones."""
_LARGER = "join arrays before the call, or give DataParallel a larger bucket_bytes="
_LARGER_TORCH = "flatten tensors before the call, or give DistributedDataParallel a larger bucket_cap_mb="


def _advise_timeline(facts: Facts) -> AdviceItems:
    """Yield advice on each cause in a step of a timeline that is worth a change; nothing for a run without steps."""
    if facts.step is None:
        return
    changes = _OWN_CHANGES | (_TORCH_CHANGES if facts.torch else {})
    if facts.hideable_ns is not None and facts.hideable_ns < WORTH_SHARE * facts.step_ns:
        changes |= dict.fromkeys((causes.WIRE, causes.COMM), _BEGIN_EARLY)
    small = next(filter(_has_many_small_calls, facts.traffic), None)  # the most exposed one
    if small is not None:
        changes |= dict.fromkeys((causes.WIRE, causes.QUEUE), _LARGER_TORCH if facts.torch else _LARGER)
    for cause in changes:  # in this order, which decides between equal gains
        if cause not in facts.mean_ns or not _is_worth_changing(facts, cause):
            continue
        ns, change = facts.cost_ns(cause), compute_gain(facts.shown_ranks, cause)
        evidence = f"{causes.OWN_WORDING[cause]}: {format_ns(ns)} of {format_ns(facts.step_ns)}, mean of the ranks"
        if small is not None and cause in (causes.WIRE, causes.QUEUE):
            evidence += f"; {small.calls:,} calls of {format_bytes(small.nbytes // small.calls)} ({small.op})"
        site = str(facts.late_ranks[0]) if cause == causes.WAIT else top_site(facts, cause)
        yield ns, Advice(
            cause=cause, change=changes[cause], place=site, evidence=evidence, gain_ns=change.stays_ns,
            gain_most_ns=change.most_ns, gain_text=f"{change}",
        )  # fmt: skip


def _has_many_small_calls(traffic: Traffic) -> bool:
    """Whether an operation has many calls in a step, each of few bytes."""
    return traffic.calls >= MANY_CALLS and 0 < traffic.nbytes < SMALL_BYTES * traffic.calls


Remedy = tuple[str, str]
"""A change to the program, and evidence for it."""


def _advise_causes(facts: Facts) -> AdviceItems:
    """Yield advice on each cause that costs enough and has a remedy, at its most expensive call site."""
    for cause in (*_REMEDIES, *_CHANGES):
        if _is_worth_changing(facts, cause):
            remedy = _REMEDIES[cause](facts) if cause in _REMEDIES else _CHANGES[cause]
            if remedy is not None:
                change, evidence = remedy
                yield _advice_with_gain(facts, [cause], change, top_site(facts, cause), evidence)


def _launch_remedy(facts: Facts) -> Remedy | None:
    """Return the remedy for a host that launches kernels too slowly, or None for a host without a device."""
    if not facts.report.on_device:
        return None
    count, median_ns = facts.report.kernels[facts.step], facts.report.kernel_median_ns[facts.step]
    evidence = f"{count} kernels of {format_ns(median_ns)} (median); the queue of the device is empty"
    if facts.report.graph_share >= MOSTLY_GRAPHS:
        change = "let graphs hold more of the step, and do less on the host between them (in serving: plan ahead)"
    elif not 0 < median_ns < TINY_KERNEL_NS:
        change = "give the host less to do between launches (profile it), or torch.compile the model"
    elif any("vllm/" in site.frame for site, _, _ in facts.sites.get(causes.LAUNCH, ())):
        change = "run with CUDA graphs: without --enforce-eager, and with cudagraph capture sizes that fit the batch"
    else:
        change = 'torch.compile(model, mode="reduce-overhead") or torch.cuda.graph; or a larger batch'
    return change, evidence


_SYNC_CHANGES = (
    (
        re.compile(r"item|_local_scalar_dense|is_nonzero"),
        "drop the .item(), float() or `if tensor` there, or read it a step later",
    ),
    (
        re.compile(r"nonzero|masked_select|unique|aten::index$"),
        "avoid shapes that depend on values: torch.where, or a mask that is multiplied",
    ),
    (
        re.compile(r"aten::(to|_to_copy|copy_)$"),
        "copy with non_blocking=True from pinned memory, or keep the tensor on the device",
    ),
)


def _device_wait_remedy(facts: Facts) -> Remedy:
    """Return the remedy for waits for the device; it depends on the operator of the longest wait."""
    operator = _costliest_site(facts, causes.SYNC).operator
    other = "do not wait for the device there (synchronize, .item(), .cpu()), or less often"
    change = next((text for pattern, text in _SYNC_CHANGES if pattern.search(operator)), other)
    return change, "the device is idle after the host has waited for it, as nothing is queued by then"


_CHANGES = {
    causes.EVENT: (
        "let streams wait for each other less often: fewer wait_stream and record_event, around larger parts",
        "queued work begins only after work of another stream",
    ),
    causes.LOCK: (
        "hold the lock for less, or give each thread its own: another thread has it, or has not done its work",
        "the program waits for another thread",
    ),
    causes.FILES: (
        "read ahead and write later, in a thread or process of their own (DataLoader workers, dcp.async_save)",
        "nothing runs while a file is read or written",
    ),
    causes.GC: (
        "gc.freeze() after the start, gc.disable(), and gc.collect() every some hundred steps on all ranks",
        "the garbage collector runs",
    ),
}
"""Changes, and the evidence, where the cause alone shows what to do."""


def _data_remedy(facts: Facts) -> Remedy:
    """Return the remedy for a data loader that is too slow; it depends on whether it has worker processes."""
    if facts.report.has_workers:
        return "more num_workers, or less work for each item", "its processes are too slow"
    change = "DataLoader(num_workers=..., prefetch_factor=..., pin_memory=True), or less work for each item"
    return change, "nothing runs while the next batch is made"


def _advise_optimizer(facts: Facts) -> AdviceItems:
    """Yield advice on an optimizer that updates parameters one by one."""
    # Call sites inside the optimizer, by cause.
    costs = {
        cause: [cost for cost in facts.sites.get(cause, ()) if cost.site.phase.startswith("Optimizer.step")]
        for cause in (causes.COMPUTE, causes.PYTHON, causes.LAUNCH)
    }
    sums_ns = {cause: sum(cost.duration_ns for cost in of_cause) for cause, of_cause in costs.items()}
    ns, calls = sum(sums_ns.values()), sum(cost.pieces for cost in costs[causes.COMPUTE])
    if ns < LOOP_SHARE * facts.step_ns or calls < MANY_OPERATORS:
        return
    yield ns, Advice(
        cause=max(sums_ns, key=lambda cause: sums_ns[cause]), change="fused=True for the optimizer (or foreach=True)",
        place=f"{costs[causes.COMPUTE][0].site.phase} ({format_ns(ns)})",
        evidence=f"it calls {calls} operators or kernels in each step",
        gain_text="not decidable: a profile does not show how long a fused update would take",
    )  # fmt: skip


def _python_remedy(facts: Facts) -> Remedy | None:
    """Return the remedy for Python between operators; None if at least half of that time is in the optimizer."""
    sites = facts.sites.get(causes.PYTHON, ())
    updates_ns = sum(ns for site, ns, _ in sites if site.phase.startswith("Optimizer.step"))
    if 2 * updates_ns >= facts.cost_ns(causes.PYTHON):
        return None
    change = "take the work out of the loop, or do it in another process"
    if not any(site.frame for site, _, _ in sites):
        change = "record with with_stack=True to see which function it is; then take it out of the loop"
    return change, "no operator runs in that time"


_ONE_TIME_CAUSES = (causes.STARTUP, causes.ALLOCATOR, causes.COMPILE, causes.CAPTURE)
"""Causes of the first steps of a program, which later steps should not have."""


def _advise_startup(facts: Facts) -> AdviceItems:
    """Yield advice on allocation or compilation if several steps have it; otherwise, to record later steps."""
    if not _is_worth_changing(facts, *_ONE_TIME_CAUSES):
        return
    cause = max(_ONE_TIME_CAUSES, key=facts.cost_ns)
    steps = [facts.mean_costs_of(step) for step in facts.costs]
    often = sum(costs.get(cause, 0) >= WORTH_SHARE * sum(costs.values()) for costs in steps)
    names = [cause]
    if cause == causes.ALLOCATOR and often > 1:
        change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and no torch.cuda.empty_cache() in the loop"
        evidence = f"memory is allocated in {often} steps"
    elif cause == causes.COMPILE and often > 1:
        change = "find what is compiled again: TORCH_LOGS=recompiles; mark sizes with torch._dynamo.mark_dynamic"
        evidence = f"{often} steps compile"
    else:
        change = "record later: torch.profiler.schedule(wait=1, warmup=3, active=3); a start says nothing of the rest"
        evidence = "the recording contains the start of the program"
        names = sorted(_ONE_TIME_CAUSES, key=facts.cost_ns, reverse=True)
    yield _advice_with_gain(facts, names, change, top_site(facts, cause), evidence)


def _copy_remedy(facts: Facts) -> Remedy:
    """Return the remedy for copies without a kernel in parallel; it depends on the most expensive one's memory."""
    kinds = _costliest_site(facts, causes.COPY).phase  # such as "Pageable -> Device"
    if "Pageable" in kinds:
        change = "pin_memory() and non_blocking=True"
    elif kinds.startswith("Device -> Device"):
        change = "avoid the copy: clone, contiguous, or another memory format (channels_last) for the whole model"
    else:
        change = "copy less, or on a stream of its own, with non_blocking=True"
    return change, "copies run with no kernel in parallel"


_REMEDIES: dict[str, Callable[[Facts], Remedy | None]] = {
    causes.LAUNCH: _launch_remedy, causes.SYNC: _device_wait_remedy, causes.DATA: _data_remedy,
    causes.PYTHON: _python_remedy, causes.COPY: _copy_remedy,
}  # fmt: skip


def _advise_late_rank(facts: Facts) -> AdviceItems:
    """Yield advice on the rank that others wait for most; none if that rank varies by step and no gain is known."""
    if not _is_worth_changing(facts, causes.WAIT) or not facts.late_ranks:
        return
    worst = facts.late_ranks[0]
    worst_by_step = [late[0] for late in facts.late_by_step.values() if late]
    steps_like_worst = [late for late in worst_by_step if (late.rank, late.cause) == (worst.rank, worst.cause)]
    varies = 2 * len(steps_like_worst) <= len(worst_by_step)
    evidence = f"other ranks wait {format_ns(worst.waited_ns)} for it in this step, added up"
    own_ns, others_ns = _median_cause_times(facts, steps_like_worst)
    if worst.cause not in ("", causes.UNKNOWN):
        what = causes.WORDING[worst.cause]
        evidence += f"; {what}: {format_ns(own_ns)} on it, {format_ns(others_ns)} on others (medians)"
    if varies and "not yet recorded" not in worst.doing:
        steps = f"{len(steps_like_worst)} of {len(worst_by_step)} steps"
        often = f"rank {worst.rank} is the last, for this reason, in {steps}"
        change = f"look for what varies, such as shapes or other programs: {often}"
    else:
        change = _late_rank_change(worst, has_more=own_ns > MORE_THAN_OTHERS * others_ns)
    ns, item = _advice_with_gain(facts, [causes.WAIT], change, str(worst), evidence)
    if not varies or item.gain_least_ns is not None:
        yield ns, item


def _late_rank_change(worst: LateRank, *, has_more: bool) -> str:
    """Return the change for a rank that is late in most steps.

    If `has_more`, its cause takes far longer than on others.
    """
    if "not yet recorded" in worst.doing:
        return "record three steps or more: recordings do not begin together, and this wait may be due to that"
    if worst.cause == causes.COMPUTE and has_more:
        return f"give rank {worst.rank} as much work as others: compare shapes, then what else its device runs"
    if worst.cause in causes.HOST and has_more:
        return f"take that work from rank {worst.rank}, or divide it among the ranks"
    return f"look at rank {worst.rank}, which comes last to collectives"


def _median_cause_times(facts: Facts, lates: Sequence[LateRank]) -> tuple[int, int]:
    """Return how long the cause of a delay took on the late rank, and on the others: medians over delays, in ns."""
    own_ns, others_ns = list[float](), list[float]()
    for late in lates:
        times_ns = {rank: step.costs_ns.get(late.cause, 0) for rank, step in facts.costs[late.step].items()}
        # `pop` leaves the times of the other ranks.
        own_ns.append(0 if late.rank is None else times_ns.pop(late.rank, 0))
        others_ns.append(median(times_ns.values()) if times_ns else 0)
    return round(median(own_ns)), round(median(others_ns))


def _advise_communication(facts: Facts) -> AdviceItems:
    """Yield advice on many small collectives; without such, on the collectives with the most exposed time."""
    if not _is_worth_changing(facts, causes.COMM, causes.WIRE) or not facts.traffic:
        return
    small = [each for each in facts.traffic if each.calls >= MANY_CALLS and _has_small_calls(each)]
    kind = small[0] if small else facts.traffic[0]  # the most exposed one is the first
    size = f" of {format_bytes(kind.nbytes // kind.calls)}" if kind.nbytes else ""
    evidence = f"{kind.calls} {kind.op}{size} a step, {format_ns(kind.exposed_ns)} exposed"
    if kind.bus_gb_s is not None:
        evidence += f"; the fastest large one has {kind.bus_gb_s:.3g} GB/s of bus bandwidth"
    if kind.bus_gb_s is not None and kind.link_gb_s is not None:
        evidence += f", its links {kind.link_gb_s:.3g}"
    if small:
        change = "join them: bucket_cap_mb of DDP, torch.distributed._coalescing_manager, or fewer, larger tensors"
    elif _is_slow_for_links(kind):
        change = "find out whether the wire is slow (NCCL_DEBUG=INFO shows the path) or a rank late (record all ranks)"
    # Prefetching helps large calls: of 1 MiB or more, or of unknown size.
    elif kind.op in ("all_gather", "reduce_scatter") and (not kind.nbytes or kind.nbytes >= kind.calls << 20):
        change = "prefetch: FSDP's set_modules_to_forward_prefetch, set_modules_to_backward_prefetch, larger units"
    elif kind.op == "all_reduce":
        change = (
            "begin it earlier, while backward computes: DistributedDataParallel, with smaller bucket_cap_mb if it is "
            "used already; or less often: no_sync() for some steps"
            if any(site.phase == BACKWARD for sites in facts.sites.values() for site, _, _ in sites)
            else "begin it earlier, with async_op=True, and wait where its result is used, or compute two half batches"
        )
    else:
        change = "issue it earlier with async_op=True, and wait where its result is used"
    calls = [
        call for call in facts.report.calls if (call.op, call.group, call.step) == (kind.op, kind.group, facts.step)
    ]
    longest = max(calls, key=lambda call: call.exposed_ns)
    if str(longest.waiter):
        evidence += f"; for the longest waits {longest.waiter}"
    names = sorted((causes.COMM, causes.WIRE), key=facts.cost_ns, reverse=True)
    yield _advice_with_gain(facts, names, change, str(longest.site), evidence)


def _is_slow_for_links(traffic: Traffic) -> bool:
    """Whether the calls are large, and yet use less than `SLOW_SHARE` of the bandwidth of their links."""
    if traffic.bus_gb_s is None or traffic.link_gb_s is None:
        return False
    return traffic.nbytes // traffic.calls >= LARGE_BYTES and traffic.bus_gb_s < SLOW_SHARE * traffic.link_gb_s


def _has_small_calls(traffic: Traffic) -> bool:
    """Whether the calls are small, or so short that they are mostly latency."""
    return 0 < traffic.nbytes < SMALL_BYTES * traffic.calls or traffic.total_ns // traffic.calls < SMALL_NS


def _advise_operator_loops(facts: Facts) -> AdviceItems:
    """Yield advice on functions that call many short operators in a loop, on a host without a device."""
    if facts.report.on_device:
        return
    tiny: dict[str, list[SiteCost]] = {}  # call sites with short operators, by function
    for cost in facts.sites.get(causes.COMPUTE, ()):
        site = cost.site
        is_short = cost.duration_ns < SHORT_OPERATOR_NS * cost.pieces
        if is_short and not _UPDATE.search(f"{site.operator} {site.phase}"):
            function = site.frame or site.module or ("" if facts.report.has_python else site.operator)
            tiny.setdefault(function, []).append(cost)
    python_ns = sum_times_by_name((site.frame or site.module, ns) for site, ns, _ in facts.sites.get(causes.PYTHON, ()))
    for function, costs in tiny.items():
        calls, ns = sum(cost.pieces for cost in costs), sum(cost.duration_ns for cost in costs)
        loop_ns = ns + python_ns[function]
        if not function or calls < MANY_OPERATORS or loop_ns < LOOP_SHARE * facts.step_ns:
            continue
        yield loop_ns, Advice(
            cause=causes.COMPUTE,
            place=f"{majority_site(costs)} ({format_ns(loop_ns)} with the Python between them)",
            change="replace the loop by operators on the whole batch (or torch.vmap, torch.compile)",
            evidence=f"{calls} calls of {list_operators(costs)}, {format_ns(ns / calls)} each",
            gain_text="not decidable: a profile does not show how long operators on the whole batch would take",
        )  # fmt: skip


def _advise_kernels(facts: Facts) -> AdviceItems:
    """Yield advice on kernels, if the device computes for most of the step: softmax or elementwise kernels."""
    classes = facts.report.kernel_classes_ns
    total_ns = sum(classes.values())
    if not facts.report.on_device or not total_ns or facts.cost_ns(causes.COMPUTE) < KERNEL_BOUND * facts.step_ns:
        return
    unknown = "not decidable: a profile does not show how long the other kernels would take"
    if classes.get("softmax", 0) > SOFTMAX_SHARE * total_ns and classes.get("matmul", 0):
        share, change = classes["softmax"] / total_ns, "torch.nn.functional.scaled_dot_product_attention"
        evidence = f"{share:.0%} of the kernels' time is softmax"
    elif (share := classes.get("elementwise", 0) / total_ns) > ELEMENTWISE_SHARE:
        change = "torch.compile(model), which fuses elementwise kernels, reductions and copies"
        evidence = f"{share:.0%} of the kernels' time is in elementwise, reducing and concatenating kernels"
    else:
        return
    ns = share * facts.cost_ns(causes.COMPUTE)
    yield ns, Advice(cause=causes.COMPUTE, change=change, place="", evidence=evidence, gain_text=unknown)


_RULES: tuple[Rule, ...] = (
    _advise_optimizer, _advise_causes, _advise_startup, _advise_late_rank, _advise_communication,
    _advise_operator_loops, _advise_kernels,
)  # fmt: skip
