"""Advice on profiles: changes to the program, each with evidence, a call site, and bounds of its gain.

A gain is the range over steps of what a step gets shorter by if all of its cause goes and the rest stays, and a bound:
see `bounds`. It is given only if it is more than by what steps differ anyway.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from ..units import format_bytes, format_ns
from . import causes
from .bounds import gain
from .facts import Facts
from .rank import TINY_KERNEL_NS
from .ranks import LateRank, Traffic
from .report import Advice
from .sites import BACKWARD, CallSite, common_site, list_operators

MAX_ADVICE = 5
"""Pieces of advice at most."""
WORTH_SHARE = 0.05
"""Part of a step that a cause must cost to be worth a change; twice that where steps show no gain."""
MIN_STEPS = 2
"""Steps from which a range of gains can be computed."""
GC_WITHOUT_PROFILER = 0.5
"""Part of a recorded garbage collection that remains, at least, without the profiler and its objects.

Measured with torch and 300,000 lists: 115 of 165 ms.
"""
SMALL_BYTES, SMALL_NS = 64 * 1024, 15_000
"""Bytes or time of a collective that is mostly latency."""
LARGE_BYTES, SLOW_SHARE = 16 << 20, 0.1
"""Bytes of a collective that should reach the bandwidth of its links, and the part of that which is slow."""
MOSTLY_GRAPHS = 0.5
"""Part of kernels launched by graphs from which on a step is one of graphs."""
LOOP_SHARE = 0.2
"""Part of a step that a loop of small operators must take to be named."""
MORE_THAN_OTHERS = 1.5
"""A rank has more to do than others if its time is longer than theirs by this factor."""
KERNEL_BOUND, SOFTMAX_SHARE, ELEMENTWISE_SHARE = 0.6, 0.2, 0.4
"""Part of a step that computes from which on kernels are judged; parts of the time of kernels that are worth advice."""
_UPDATE = re.compile(r"AccumulateGrad|^Optimizer\.| Optimizer\.|_foreach_")
SHORT_OPERATOR_NS, MANY_OPERATORS = 50_000, 500
"""Operators of a host that are shorter, and that many in one function, are called in a loop."""
MANY_CALLS = 50
"""Collectives of a step that are so many and small should be joined."""


def advice(facts: Facts) -> list[Advice]:
    """Return at most `MAX_ADVICE` changes, that with the largest cause first."""
    items = [
        (ns, item)
        for rule in (_RULES if facts.profile else (_advise_timeline,))
        for ns, item in rule(facts)
        if item.gain_least_ns is not None or item.gain_ns is not None or ns >= 2 * WORTH_SHARE * facts.step_ns
        or len(facts.costs) < MIN_STEPS
    ]  # fmt: skip
    by_cause = {"first": facts.first} if facts.first else {}
    for _, item in sorted(items, key=lambda each: -each[0]):
        by_cause.setdefault(item.cause, item)  # one change for each cause: the one that is worth most
    return [*by_cause.values()][:MAX_ADVICE]


def gain_bounds(facts: Facts, *names: str) -> tuple[int | None, int | None, str]:
    """Return the least and most gain of a step without some causes if the rest stays, and text that has the bound, too.

    None, None and a reason if undecidable.
    """
    found = [gain([*ranks.values()], *names) for ranks in facts.costs.values()]
    gains, most = [each.stays_ns for each in found], max(each.most_ns for each in found)
    if causes.GC in names:
        gains += [round(GC_WITHOUT_PROFILER * ns) for ns in gains]
    walls_ns = [sum(facts.mean_of(step).values()) for step in facts.costs]
    if len(walls_ns) < MIN_STEPS:
        return None, None, f"not given: one step is recorded, and it has {format_ns(gains[0])} of it"
    if 2 * min(gains) <= max(walls_ns) - min(walls_ns):
        return None, None, f"not given: steps differ by {format_ns(max(walls_ns) - min(walls_ns))} anyway"
    text = f"{format_ns(min(gains))} to {format_ns(max(gains))} a step (over {len(walls_ns)} steps) if the rest stays"
    return min(gains), max(gains), f"{text}, at most {format_ns(most)}"


AdviceItems = Iterator[tuple[float, Advice]]
Rule = Callable[[Facts], AdviceItems]


def _gain_item(facts: Facts, names: Sequence[str], change: str, site: str, evidence: str) -> tuple[float, Advice]:
    """Return the time of some causes in the shown step, and the advice on the first of them, with the gain of all."""
    least, most, text = gain_bounds(facts, *names)
    return facts.cost_ns(*names), Advice(
        cause=names[0], change=change, place=site, evidence=evidence, gain_least_ns=least, gain_most_ns=most,
        gain_text=text,
    )  # fmt: skip


def _is_worth(facts: Facts, *names: str) -> bool:
    return facts.cost_ns(*names) >= WORTH_SHARE * facts.step_ns


def top_site(facts: Facts, cause: str) -> str:
    """Return the call site that costs most for a cause, by operator; "" if none is known."""
    return next((each.text() for each in facts.site_times(cause)), "")


def is_launch_bound(facts: Facts) -> bool:
    """Whether kernels are shorter than launches, and are launched one by one."""
    return facts.report.graph_share < MOSTLY_GRAPHS and 0 < facts.report.kernel_median_ns[facts.step] < TINY_KERNEL_NS


_AWAIT_LATE = "issue first and await at the end of the step: keep the futures in a list"
_OWN_CHANGES = {
    causes.WAIT: "share its work out evenly, or look for what slows its host",
    causes.WIRE: _AWAIT_LATE,
    causes.COMM: _AWAIT_LATE,
    causes.LOOP: "call it in a thread, trio.to_thread.run_sync in a nursery, and await that late",
    causes.COPY: "copy in parallel with computes, on another stream of the device",
    causes.QUEUE: "issue on another stream, rank.stream(...), or give it a larger window=",
}
"""Changes of a program of ours."""
_TORCH_CHANGES = {
    causes.WIRE: "issue first and wait at the end of the step: async_op=True, and keep the works in a list",
    causes.QUEUE: "issue fewer and larger operations",
}
"""Changes of a program of PyTorch with our backend, where there is another word for it."""
_LARGER = "join arrays before the call, or give DataParallel a larger bucket_bytes="
_LARGER_TORCH = "flatten tensors before the call, or give DistributedDataParallel a larger bucket_cap_mb="


def _advise_timeline(facts: Facts) -> AdviceItems:
    """Advise on each loss of a timeline that is worth a change; nothing on a whole run."""
    if facts.step is None:
        return
    changes = _OWN_CHANGES | (_TORCH_CHANGES if facts.torch else {})
    small = [each for each in facts.traffic if each.calls >= MANY_CALLS and 0 < each.nbytes < SMALL_BYTES * each.calls]
    if small:
        changes |= dict.fromkeys((causes.WIRE, causes.QUEUE), _LARGER_TORCH if facts.torch else _LARGER)
    for cause in changes.keys() & facts.mean_ns.keys():
        if not _is_worth(facts, cause):
            continue
        ns, change = facts.cost_ns(cause), gain(facts.shown, cause)
        evidence = f"{causes.OWN_WORDING[cause]}: {format_ns(ns)} of {format_ns(facts.step_ns)}, mean of the ranks"
        if small and cause in (causes.WIRE, causes.QUEUE):
            size = format_bytes(small[0].nbytes // small[0].calls)
            evidence += f"; {small[0].calls:,} calls of {size} ({small[0].op})"
        site = str(facts.late[0]) if cause == causes.WAIT else top_site(facts, cause)
        yield ns, Advice(
            cause=cause, change=changes[cause], place=site, evidence=evidence, gain_ns=change.stays_ns,
            gain_most_ns=change.most_ns, gain_text=f"{change}",
        )  # fmt: skip


Remedy = tuple[str, str]
"""A change to the program, and evidence for it."""


def _advise_causes(facts: Facts) -> AdviceItems:
    """Advise on each cause that costs enough and has a remedy, at its most expensive call site."""
    for cause in (*_REMEDIES, *_CHANGES):
        if _is_worth(facts, cause):
            remedy = _REMEDIES[cause](facts) if cause in _REMEDIES else _CHANGES[cause]
            if remedy is not None:
                yield _gain_item(facts, [cause], remedy[0], top_site(facts, cause), remedy[1])


def _launch_remedy(facts: Facts) -> Remedy | None:
    """Return the remedy for a host that launches the kernels of its device too slowly; none on a host alone."""
    if not facts.report.on_device:
        return None
    count, median_ns = facts.report.kernels[facts.step], facts.report.kernel_median_ns[facts.step]
    evidence = f"{count} kernels of {format_ns(median_ns)} (median); the queue of the device is empty"
    if facts.report.graph_share >= MOSTLY_GRAPHS:
        change = "let graphs hold more of the step, and do less on the host between them (in serving: plan ahead)"
    elif not is_launch_bound(facts):
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
    """Return the remedy for the call site at which the host waited longest for the device, by the operator there."""
    site, *_ = next(iter(facts.sites.get(causes.SYNC, ())), (CallSite(),))
    change = next((text for pattern, text in _SYNC_CHANGES if pattern.search(site.operator)), "")
    change = change or "do not wait for the device there (synchronize, .item(), .cpu()), or less often"
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
    if facts.report.has_workers:
        return "more num_workers, or less work for each item", "its processes are too slow"
    change = "DataLoader(num_workers=..., prefetch_factor=..., pin_memory=True), or less work for each item"
    return change, "nothing runs while the next batch is made"


def _advise_optimizer(facts: Facts) -> AdviceItems:
    """Advise on an optimizer that updates parameters one by one."""
    parts = [
        (cause, site, ns, count)
        for cause in (causes.COMPUTE, causes.PYTHON, causes.LAUNCH)
        for site, ns, count in facts.sites.get(cause, ())
        if site.phase.startswith("Optimizer.step")
    ]
    ns, calls = sum(ns for _, _, ns, _ in parts), sum(count for cause, *_, count in parts if cause == causes.COMPUTE)
    if ns < LOOP_SHARE * facts.step_ns or calls < MANY_OPERATORS:
        return
    sums: Counter[str] = Counter()
    for cause, _, of_it, _ in parts:
        sums[cause] += of_it
    yield ns, Advice(
        cause=sums.most_common(1)[0][0], change="fused=True for the optimizer (or foreach=True)",
        place=f"{parts[0][1].phase} ({format_ns(ns)})", evidence=f"it calls {calls} operators or kernels in each step",
        gain_text="not decidable: a profile does not show how long a fused update would take",
    )  # fmt: skip


def _python_remedy(facts: Facts) -> Remedy | None:
    """Return the remedy for Python between operators; none if half of it is in the optimizer, which has its own."""
    sites = facts.sites.get(causes.PYTHON, ())
    updates = sum(ns for site, ns, _ in sites if site.phase.startswith("Optimizer.step"))
    if 2 * updates >= facts.cost_ns(causes.PYTHON):
        return None
    change = "take the work out of the loop, or do it in another process"
    if not any(site.frame for site, _, _ in sites):
        change = "record with with_stack=True to see which function it is; then take it out of the loop"
    return change, "no operator runs in that time"


_ONE_TIME_CAUSES = (causes.STARTUP, causes.ALLOCATOR, causes.COMPILE, causes.CAPTURE)


def _advise_startup(facts: Facts) -> AdviceItems:
    """Advise on allocation and compilation if several steps have them, or else on recording later."""
    if not _is_worth(facts, *_ONE_TIME_CAUSES):
        return
    cause = max(_ONE_TIME_CAUSES, key=facts.cost_ns)
    steps = [facts.mean_of(step) for step in facts.costs]
    often = sum(costs.get(cause, 0) >= WORTH_SHARE * sum(costs.values()) for costs in steps)
    if cause == causes.ALLOCATOR and often > 1:
        change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and no torch.cuda.empty_cache() in the loop"
        yield _gain_item(facts, [cause], change, top_site(facts, cause), f"memory is allocated in {often} steps")
    elif cause == causes.COMPILE and often > 1:
        change = "find what is compiled again: TORCH_LOGS=recompiles; mark sizes with torch._dynamo.mark_dynamic"
        yield _gain_item(facts, [cause], change, top_site(facts, cause), f"{often} steps compile")
    else:
        change = "record later: torch.profiler.schedule(wait=1, warmup=3, active=3); a start says nothing of the rest"
        evidence = "the recording contains the start of the program"
        yield _gain_item(
            facts, sorted(_ONE_TIME_CAUSES, key=facts.cost_ns, reverse=True), change, top_site(facts, cause), evidence
        )


def _copy_remedy(facts: Facts) -> Remedy:
    """Return the remedy for the most expensive copy that no kernel runs in parallel to, by its kinds of memory."""
    site, *_ = next(iter(facts.sites.get(causes.COPY, ())), (CallSite(),))
    if "Pageable" in site.phase:
        change = "pin_memory() and non_blocking=True"
    elif site.phase.startswith("Device -> Device"):
        change = "avoid the copy: clone, contiguous, or another memory format (channels_last) for the whole model"
    else:
        change = "copy less, or on a stream of its own, with non_blocking=True"
    return change, "copies run with no kernel in parallel"


_REMEDIES: dict[str, Callable[[Facts], Remedy | None]] = {
    causes.LAUNCH: _launch_remedy, causes.SYNC: _device_wait_remedy, causes.DATA: _data_remedy,
    causes.PYTHON: _python_remedy, causes.COPY: _copy_remedy,
}  # fmt: skip


def _advise_late_rank(facts: Facts) -> AdviceItems:
    """Advise on the rank that others wait for most; nothing if it varies by step and no gain shows."""
    if _is_worth(facts, causes.WAIT) and facts.late:
        worst, last = facts.late[0], [late[0] for late in facts.last.values() if late]
        same_cause = [one for one in last if (one.rank, one.cause) == (worst.rank, worst.cause)]
        varies = 2 * len(same_cause) <= len(last)
        evidence = f"other ranks wait {format_ns(worst.waited_ns)} for it in this step, added up"
        mine_ns, others_ns = (
            round(median(_cause_ns(facts, one, of_others=of_others) for one in same_cause))
            for of_others in (False, True)
        )
        if worst.cause not in ("", causes.UNKNOWN):
            what = causes.WORDING[worst.cause]
            evidence += f"; {what}: {format_ns(mine_ns)} on it, {format_ns(others_ns)} on others (medians)"
        if "not yet recorded" in worst.doing:
            change = "record three steps or more: recordings do not begin together, and this wait may be due to that"
        elif varies:
            often = f"rank {worst.rank} is the last, for this reason, in {len(same_cause)} of {len(last)} steps"
            change = f"look for what varies, such as shapes or other programs: {often}"
        elif worst.cause == causes.COMPUTE and mine_ns > MORE_THAN_OTHERS * others_ns:
            change = f"give rank {worst.rank} as much work as others: compare shapes, then what else its device runs"
        elif worst.cause in causes.HOST and mine_ns > MORE_THAN_OTHERS * others_ns:
            change = f"take that work from rank {worst.rank}, or divide it among the ranks"
        else:
            change = f"look at rank {worst.rank}, which comes last to collectives"
        ns, item = _gain_item(facts, [causes.WAIT], change, str(worst), evidence)
        if varies and item.gain_least_ns is None:
            return
        yield ns, item


def _cause_ns(facts: Facts, late: LateRank, *, of_others: bool) -> float:
    """Return a late rank's time for the cause of its delay, in the step of the delay; or the others' median of it."""
    ranks = facts.costs[late.step].items()
    found = [each.costs_ns.get(late.cause, 0) for rank, each in ranks if (rank != late.rank) is of_others]
    return median(found) if found else 0


def _advise_communication(facts: Facts) -> AdviceItems:
    """Advise on many small collectives, or else on the most exposed kind, with its bandwidth and longest call."""
    if not _is_worth(facts, causes.COMM, causes.WIRE) or not facts.traffic:
        return
    small = [each for each in facts.traffic if each.calls >= MANY_CALLS and _is_small(each)]
    kind = small[0] if small else facts.traffic[0]
    size = f" of {format_bytes(kind.nbytes // kind.calls)}" if kind.nbytes else ""
    evidence = f"{kind.calls} {kind.op}{size} a step, {format_ns(kind.exposed_ns)} exposed"
    if kind.bus_gb_s is not None:
        evidence += f"; the fastest large one has {kind.bus_gb_s:.3g} GB/s of bus bandwidth"
    if kind.bus_gb_s is not None and kind.link_gb_s is not None:
        evidence += f", its links {kind.link_gb_s:.3g}"
    if small:
        change = "join them: bucket_cap_mb of DDP, torch.distributed._coalescing_manager, or fewer, larger tensors"
    elif kind.bus_gb_s is not None and _is_slow(kind):
        change = "find out whether the wire is slow (NCCL_DEBUG=INFO shows the path) or a rank late (record all ranks)"
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
    where = str(longest.site)
    if str(longest.waiter):
        evidence += f"; for the longest waits {longest.waiter}"
    yield _gain_item(
        facts, sorted((causes.COMM, causes.WIRE), key=facts.cost_ns, reverse=True), change, where, evidence
    )


def _is_slow(traffic: Traffic) -> bool:
    """Whether messages are large, and yet have less than `SLOW_SHARE` of the links' bandwidth."""
    large = traffic.nbytes // traffic.calls >= LARGE_BYTES
    return large and traffic.link_gb_s is not None and (traffic.bus_gb_s or 0) < SLOW_SHARE * traffic.link_gb_s


def _is_small(traffic: Traffic) -> bool:
    return 0 < traffic.nbytes < SMALL_BYTES * traffic.calls or traffic.total_ns // traffic.calls < SMALL_NS


def _advise_operator_loops(facts: Facts) -> AdviceItems:
    """Advise on a loop that calls an operator on a host for each of many small parts."""
    if facts.report.on_device:
        return
    tiny: dict[str, list[tuple[CallSite, int, int]]] = {}
    for called, ns, count in facts.sites.get(causes.COMPUTE, ()):
        if ns < SHORT_OPERATOR_NS * count and not _UPDATE.search(f"{called.operator} {called.phase}"):
            function = called.frame or called.module or ("" if facts.report.has_python else called.operator)
            tiny.setdefault(function, []).append((called, ns, count))
    python_sites = [(called, ns) for called, ns, _ in facts.sites.get(causes.PYTHON, ())]
    for function, sites in tiny.items():
        calls, ns = sum(count for _, _, count in sites), sum(part_ns for _, part_ns, _ in sites)
        loop_ns = ns + sum(of_it for called, of_it in python_sites if function == (called.frame or called.module))
        if not function or calls < MANY_OPERATORS or loop_ns < LOOP_SHARE * facts.step_ns:
            continue
        sums = [(called, part_ns) for called, part_ns, _ in sites]
        where = common_site(sums)
        yield (
            loop_ns,
            Advice(
                cause=causes.COMPUTE,
                place=f"{where} ({format_ns(loop_ns)} with the Python between them)",
                change="replace the loop by operators on the whole batch (or torch.vmap, torch.compile)",
                evidence=f"{calls} calls of {list_operators(sums)}, {format_ns(ns / calls)} each",
                gain_text="not decidable: a profile does not show how long operators on the whole batch would take",
            ),
        )


def _advise_kernels(facts: Facts) -> AdviceItems:
    """Advise on kernels where the device is busy; a profile does not show how fast others would be."""
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
    yield (
        share * facts.cost_ns(causes.COMPUTE),
        Advice(cause=causes.COMPUTE, change=change, place="", evidence=evidence, gain_text=unknown),
    )


_RULES: tuple[Rule, ...] = (
    _advise_optimizer, _advise_causes, _advise_startup, _advise_late_rank, _advise_communication,
    _advise_operator_loops, _advise_kernels,
)  # fmt: skip
