"""Roles of ranks: which ranks should hold the same parameters, and which should have the same input. Pure.

Programs declare no roles. They follow from placements of DTensors, groups of DistributedDataParallel, and the groups
over which gradients and activations are added up. Where these show nothing, nothing is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..ranklist import named_ranks
from .record import FirstForward, Record, Transfer, Verdict


def judge_first_forward(record: Record) -> Verdict | None:
    """Return the first verdict on parameters or inputs that ranks should share, and that differ at the first forward.

    None if there is no difference.
    """
    firsts = {first.rank: first for first in record.first_forwards}
    checks = (_judge_broadcasts, _judge_shared_weights, _judge_reductions, _judge_inputs)
    return next((verdict for check in checks for verdict in check(record, firsts)), None)


def _transfers_by_operation(record: Record, op: str) -> Iterator[list[Transfer]]:
    """Yield, for each operation of kind `op`, the transfers of its ranks."""
    met: dict[tuple[str, int], list[Transfer]] = {}
    for transfer in record.transfers:
        if transfer.issue.call.op == op:
            met.setdefault((transfer.issue.call.key, transfer.issue.seq), []).append(transfer)
    yield from met.values()


def _judge_broadcasts(record: Record, firsts: dict[int, FirstForward]) -> Iterator[Verdict]:
    """Yield verdicts on ranks that broadcast the same parameters in different orders."""
    sent = {(each.issue.rank, each.names[0]) for each in record.transfers if each.issue.call.op == "broadcast"}
    for transfers in _transfers_by_operation(record, "broadcast"):
        first, *others = sorted(transfers, key=lambda transfer: transfer.issue.rank)
        for other in others:
            a, b, ranks = first.names[0], other.names[0], (other.issue.rank, first.issue.rank)
            if a != b and (ranks[1], b) in sent and (ranks[0], a) in sent:
                text = (
                    f"{other.issue.title} has '{b}' on rank {ranks[0]} and '{a}' on rank {ranks[1]}: the order of the "
                    "broadcasts depends on the rank"
                )
                yield Verdict(kind="broadcast order", text=text, ranks=ranks, lines=(other.issue.call.site,))


def _judge_shared_weights(record: Record, firsts: dict[int, FirstForward]) -> Iterator[Verdict]:
    """Yield verdicts on parameters that ranks should share, and that differ, or that only some of the ranks train.

    Ranks should share a parameter by placements or DistributedDataParallel, or if all models are equal.
    """
    models = [{name: weight.digest for name, weight in first.weights.items()} for first in firsts.values()]
    everyone = range(record.size) if len(firsts) == record.size and all(model == models[0] for model in models) else ()
    for rank, first in firsts.items():
        for name, weight in first.weights.items():
            for other in filter(firsts.__contains__, weight.members or everyone):
                other_weight, line = firsts[other].weights.get(name, weight), firsts[other].line
                place = f"at the first forward ({line})"
                if other_weight.digest != weight.digest:
                    text = (
                        f"{place} '{name}' differs: rank {other} ({other_weight.digest}) from rank {rank} "
                        f"({weight.digest}); {named_ranks(weight.members)} hold the same part of it"
                    )
                    yield Verdict(kind="weights differ", text=text, ranks=(other, rank), lines=(line,))
                if weight.trained and not other_weight.trained:
                    text = (
                        f"{place} '{name}' is frozen (requires_grad=False) on rank {other}, and rank {rank} trains it"
                    )
                    yield Verdict(kind="gradient missing", text=text, ranks=(other, rank), lines=(line,))


def _judge_reductions(record: Record, firsts: dict[int, FirstForward]) -> Iterator[Verdict]:
    """Yield verdicts on gradients that were added up over ranks with different values of the parameter."""
    for transfers in _transfers_by_operation(record, "all_reduce"):
        ranks = [transfer.issue.rank for transfer in transfers]
        if any(rank not in firsts for rank in ranks):
            continue
        for names in zip(*(transfer.names for transfer in transfers), strict=False):
            held = {rank: firsts[rank].weights.get(name) for rank, name in zip(ranks, names, strict=True)}
            digests = {rank: weight.digest for rank, weight in held.items() if weight is not None}
            issue, name = transfers[0].issue, names[0]
            holders = "" if len(digests) < len(ranks) else _other_holders_clause(firsts, name, digests)
            if not holders or len(set(digests.values())) == 1:
                continue
            yield Verdict(
                kind="wrong reduction", ranks=tuple(ranks), lines=(issue.call.site,),
                text=f"the gradient of '{name}' is reduced over {named_ranks(issue.call.members)} by {issue.title}, "
                f"which hold different values of it at the first forward ({firsts[ranks[0]].line}); {holders}",
            )  # fmt: skip


def _other_holders_clause(firsts: dict[int, FirstForward], name: str, digests: dict[int, str]) -> str:
    """Return "ranks ... hold the same as rank R" if ranks outside of `digests` hold the value of R; otherwise ""."""
    for rank, digest in digests.items():
        same = [rank for rank, first in firsts.items() if (held := first.weights.get(name)) and held.digest == digest]
        if not set(same) <= set(digests):
            return f"{named_ranks(sorted(same))} hold the same as rank {rank}"
    return ""


def _judge_inputs(record: Record, firsts: dict[int, FirstForward]) -> Iterator[Verdict]:
    """Yield verdicts on inputs that differ between the ranks of a tensor-parallel group."""
    groups = [(first.members, "declare it as replicated", first.line) for first in firsts.values() if first.members]
    for members, line in record.activations:
        if _hold_different_weights(record, firsts, members):
            groups.append((members, f"add up activations at {line}", line))
    for members, reason, line in groups:
        inputs = {rank: firsts[rank].digest for rank in members if rank in firsts}
        usual_digest = Counter(inputs.values()).most_common(1)[0][0] if inputs else ""
        odd_ranks = [rank for rank, digest in inputs.items() if digest != usual_digest]
        if odd_ranks:
            usual_rank = next(rank for rank in inputs if rank not in odd_ranks)
            odd, has = firsts[odd_ranks[0]], "has" if len(odd_ranks) == 1 else "have"
            text = (
                f"at the first forward ({odd.line}) {named_ranks(odd_ranks)} {has} another input ({odd.digest}) than "
                f"rank {usual_rank} ({usual_digest}), and {named_ranks(members)} {reason}: give them the same input; "
                f"it meets '{odd.parameter}' first"
            )
            lines = tuple(dict.fromkeys((odd.line, line)))
            yield Verdict(kind="inputs differ", text=text, ranks=(*odd_ranks, usual_rank), lines=lines)


def _hold_different_weights(record: Record, firsts: dict[int, FirstForward], members: tuple[int, ...]) -> bool:
    """Whether ranks, all with a first forward, differ in a parameter whose gradients they never sum together."""
    if any(rank not in firsts for rank in members):
        return False
    summed_names = {name for transfer in record.transfers if set(members) <= set(transfer.issue.call.members)
              for name in transfer.names}  # fmt: skip
    for name in firsts[members[0]].weights.keys() - summed_names:
        digests = {firsts[rank].weights[name].digest for rank in members if name in firsts[rank].weights}
        if len(digests) > 1:
            return True
    return False
