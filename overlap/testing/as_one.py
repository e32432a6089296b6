"""Comparison of many ranks with one rank on the joined batch: gradients of the first updates, by parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..ranklist import named_ranks
from .batches import Batches
from .record import Issue, Record, Verdict
from .substitutes import Declined, Substitute, UpdateRecord, join_whole_tensor
from .tensor_parts import digest

if TYPE_CHECKING:
    from .run import Run

Repeat: TypeAlias = "Callable[[int, Substitute, int, bool], tuple[Run, list[Batches]]]"
"""Runs the program again: (number of ranks, source of data and weights, number of updates, whether to record all)."""

Result: TypeAlias = tuple[list[Verdict], str]
"""Verdicts, and a note on what was compared, or why nothing was."""

KIND = "gradient differs"

# Largest relative difference that rounding explains, by bytes of a type: of sums over a thousand terms in another
# order, through a few layers; for 16 bits, of one term. A wrong factor that is nearer to 1 than this is not found.
_TOLERANCES = {8: 1e-9, 4: 1e-3, 2: 6e-2}


def _group_by_weights(recorded: list[Batches], *, distributed: bool) -> list[list[int]]:
    """Group ranks that hold the same weights; with `distributed`, also the same parts of distributed tensors."""
    found: dict[object, list[int]] = {}
    for rank, each in enumerate(recorded):
        weights = each.steps[0].weights.items()
        key = tuple((name, digest(part.tensor)) for name, part in weights if distributed or not part.placements)
        found.setdefault(key, []).append(rank)
    return list(found.values())


def _records_of_update(update: int, recorded: Iterable[Batches]) -> list[UpdateRecord]:
    """Return the record of update `update` (from 0) of each rank that made it."""
    return [batches.steps[update] for batches in recorded if update < len(batches.steps)]


class AsOne:
    """Comparison of a run with a run of fewer ranks, by the gradients of their first updates.

    Args:
        run: The run of many ranks.
        recorded: The record of each rank's updates.
        repeat: Runs the program again, with other ranks and data.
    """

    def __init__(self, run: Run, recorded: list[Batches], repeat: Repeat) -> None:
        self._run, self._recorded, self._repeat = run, recorded, repeat
        self._compared: Counter[int] = Counter()  # gradients, by update
        self._steps = [each.steps for each in recorded]
        self._models = _group_by_weights(recorded, distributed=False)
        # Number of updates up to the last one with gradients; 0 if there is none.
        self._updates = max(
            (at + 1 for each in recorded for at, step in enumerate(each.steps) if step.gradients), default=0
        )

    def compare(self) -> Result:
        """Compare gradients. If that is impossible, there are no verdicts, and the note has the reason."""
        try:
            self._check_comparable()
            if any(self._has_local_gradients(step) for step in range(self._updates)):
                return self._compare_with_same_data(len(self._models), "ranks make updates of their own")
            reasons: list[str] = []
            # Try one rank first, then more, until the program can run.
            for size in (size for size in range(1, self._run.size) if self._run.size % size == 0):
                for compare in (self._compare_with_joined_data, self._compare_with_same_data):
                    try:
                        return compare(size, reasons[-1] if reasons else "")
                    except Declined as declined:
                        reasons.append(f"with {size} rank{'s' * (size > 1)}, {declined}")
            raise Declined(reasons[0] if reasons else "there is one rank only; run it with 2 ranks or more")
        except Declined as declined:
            return [], f"not compared: {declined}"

    def _check_comparable(self) -> None:
        """Raise `Declined`, with the reason and advice, if the run has no gradients to compare."""
        if self._run.error is not None:
            raise Declined("the run failed; make it pass first")
        steps = [step for each in self._recorded for step in each.steps]
        if not self._updates:
            calls = any(step.losses for step in steps)
            missing = "makes no update by an optimizer" if calls else "never calls backward"
            raise Declined(f"the program {missing}; run at least one step of training")
        # `steps[0]` is the record up to the first update; `data` are the batches of its forwards.
        if not any(each.steps[0].data for each in self._recorded):
            lines = [line for each in self._recorded if (line := each.steps[0].line)]
            update = f"the first optimizer.step(){f' ({lines[0]})' if lines else ''}"
            advice = "call forward and backward before step() to have it compared"
            raise Declined(f"{update} begins before any forward, as with a closure; {advice}")
        known = {name for each in self._recorded for name in each.steps[0].weights}
        late = [name for step in steps for name in step.gradients if name not in known]
        if late:
            raise Declined(
                f"'{late[0]}' was made after the first forward had begun, and its first values are unknown; make all "
                "parameters before the first forward"
            )

    def _has_local_gradients(self, update: int) -> bool:
        """Whether ranks with the same weights have different gradients in update `update`."""
        for ranks in self._models:  # each a list of the ranks that have the same weights
            steps = _records_of_update(update, [self._recorded[rank] for rank in ranks])
            for name in steps[0].gradients if steps else ():
                parts = [step.gradients[name] for step in steps if name in step.gradients]
                # Distributed tensors, which have placements, may differ between ranks.
                if not parts[0].placements and len({digest(part.tensor) for part in parts}) > 1:
                    return True
        return False

    def _compare_with_joined_data(self, size: int, _: str) -> Result:
        """Compare with `size` ranks, each on the joined data of all ranks that hold its part of the model."""
        classes, steps = [list(range(self._run.size))] if size == 1 else self._ranks_of_each_part(size), self._steps
        models = [self._models] if size == 1 else [[ranks] for ranks in classes]
        few = Substitute(steps, classes, models)
        return self._compare_runs(self._recorded, few, self._run_again(size, few, every=False), " on the joined batch")

    def _compare_with_same_data(self, size: int, why_not: str) -> Result:
        """Compare two runs in which ranks with the same weights get the same data; the note ends with `why_not`.

        It does not test sums over different data. But it can compare programs whose ranks use statistics of their own
        data, or make updates of their own.
        """
        models = self._ranks_of_each_part(size)
        if not self._has_mean_losses():
            raise Declined("the loss is no mean; average it over its samples")
        everyone, steps = range(self._run.size), self._steps
        donors = [next(ranks[:1] for ranks in models if rank in ranks) for rank in everyone]
        many = Substitute(steps, donors, [], updates=0)
        few = Substitute(steps, [ranks[:1] for ranks in models], [[ranks] for ranks in models], updates=1)
        self._updates = len(self._recorded[0].steps) - 1
        recorded = self._run_again(self._run.size, many, every=True)
        data = ", with the same data for ranks that hold the same"
        verdicts, note = self._compare_runs(recorded, few, self._run_again(size, few, every=True), data)
        return verdicts, f"{note}: {why_not}"

    def _compare_runs(self, many: list[Batches], source: Substitute, few: list[Batches], data: str) -> Result:
        """Compare the gradients of two runs, up to the first update in which they differ.

        The text `data` describes the data of the smaller run. Raises `Declined` if the two runs computed different
        losses.
        """
        differences: list[GradientDifference] = []
        for update in range(self._updates):
            self._check_losses(update, many, few)
            for own, models in zip(few, source.models, strict=True):
                differences += self._find_differences(update, own, models, many)
            if differences:  # later updates differ for that reason
                break
        comparison = f"{'one rank' if len(few) == 1 else f'{len(few)} ranks, the fewest that can run it'}{data}"
        note = f"{sum(self._compared.values())} gradients compared with {comparison}"
        return self._make_verdicts(differences, comparison), note

    def _ranks_of_each_part(self, size: int) -> list[list[int]]:
        """Return, for each part of the model, the ranks that hold it; raise `Declined` unless there are `size`."""
        # A single rank holds distributed tensors whole, so they do not tell parts apart; with several ranks they do.
        models = self._models if size == 1 else _group_by_weights(self._recorded, distributed=True)
        if len(models) != size:
            raise Declined(f"ranks hold {len(models)} different parts of the model")
        return models

    def _run_again(self, size: int, source: Substitute, *, every: bool) -> list[Batches]:
        """Run the program on `size` ranks with data of `source`; `every` records the gradients of all updates.

        Raises `Declined` if the run fails, or if its tensors do not fit the source.
        """
        run, recorded = self._repeat(size, source, self._updates, every)
        if source.declined is not None:
            raise source.declined
        if run.error is not None:
            raise Declined(f"the program fails: {run.verdict and run.verdict.text}")
        return recorded

    def _check_losses(self, update: int, many: list[Batches], few: list[Batches]) -> None:
        """Raise `Declined` unless the mean losses of two runs are equal, or differ by a whole factor."""
        many_losses, few_losses = (
            [step.losses for step in _records_of_update(update, recorded) if step.losses] for recorded in (many, few)
        )
        if len({len(losses) for losses in (*many_losses, *few_losses)}) > 1:
            raise Declined("the number of backward passes depends on the rank, or on their number; make it equal")
        for of_many, of_few in zip(zip(*many_losses, strict=True), zip(*few_losses, strict=True), strict=False):
            many_mean, few_mean = (sum(loss.value for loss in losses) / len(losses) for losses in (of_many, of_few))
            large, small = max(abs(many_mean), abs(few_mean)), min(abs(many_mean), abs(few_mean))
            factor = round(large / small) if small else 0
            if abs(large - factor * small) > self._tolerance(4) * large or factor > self._run.size**2:
                draws = [step.draws for step in _records_of_update(update, many) if step.draws]
                advice = "average the loss over its samples, and use no layer with statistics of the batch"
                if draws:
                    advice = f"the forward at {draws[0]} draws random numbers: switch dropout off, or draw none"
                raise Declined(
                    f"the forwards differ: the mean of the ranks' losses at {of_many[0].line} is {many_mean:.6g}, with "
                    f"fewer ranks it is {few_mean:.6g}; {advice}"
                )

    def _has_mean_losses(self) -> bool:
        """Whether there are losses, and all are means times a constant: sums depend on the number of samples."""
        losses = [loss for each in self._recorded for step in each.steps for loss in step.losses]
        return bool(losses) and all(loss.is_mean for loss in losses)

    def _tolerance(self, itemsize: int) -> float:
        """Return the largest relative difference by rounding: that of 16 bits if anything was computed in them."""
        half = any("float16" in issue.call.form for issue in self._run.record.issues)
        half = half or any(each.half for each in self._recorded)
        return _TOLERANCES[2 if half else itemsize]

    # -- differences -------------------------------------------------------------------------------------------------

    def _find_differences(
        self, update: int, few: Batches, models: list[list[int]], recorded: list[Batches]
    ) -> list[GradientDifference]:
        """Return the gradients of an update that differ by more than rounding; [] if `few` has no such update.

        Each of `models` lists ranks of the larger run with the same weights. Their parts together make the gradients of
        the rank of the smaller run.
        """
        if update >= len(few.steps):
            return []
        expected, rates = few.steps[update].gradients, few.steps[update].rates
        of_ranks = [batches.steps[update].gradients if update < len(batches.steps) else {} for batches in recorded]
        largest = max(
            (float(part.tensor.abs().max()) for part in expected.values() if part.tensor.numel()), default=0.0
        )
        differences = []
        for name, part in expected.items():
            gradient = join_whole_tensor(name, of_ranks, models, part.tensor.shape)
            if gradient is None:
                continue
            self._compared[update] += 1
            tolerance = self._tolerance(part.tensor.element_size())
            factor = _find_factor(gradient.double(), part.tensor.double(), largest, tolerance)
            step = next(step for step in _records_of_update(update, recorded) if name in step.gradients)
            # A learning rate that makes up for the factor is no fault.
            rate = step.rates[name] / rates[name] if rates.get(name) else 1.0
            if factor is not None and not (factor and abs(factor * rate - 1) < tolerance):
                differences.append(GradientDifference(name, update, factor, step.line))
        return differences

    def _make_verdicts(self, differences: list[GradientDifference], comparison: str) -> list[Verdict]:
        """Return verdicts on the differences: one for all gradients with the same factor and the same reduction."""
        factors = {_round_factor(difference.factor) for difference in differences}
        every = bool(differences) and len(differences) == self._compared[differences[0].at]
        # One factor for all gradients may come from the divisor of a loss that is no mean.
        if len(factors) == 1 and 0 not in factors and every and not self._has_mean_losses():
            raise Declined(
                f"its gradients are {float(factors.pop()):.3g} times those of {comparison}, and the loss is no mean: a "
                "divisor may count data, or ranks; average the loss over its samples"
            )
        groups: dict[object, tuple[Issue | None, list[GradientDifference]]] = {}
        for difference in differences:
            issue = self._find_reducing_operation(difference)
            key = _round_factor(difference.factor), issue and (issue.call.site, issue.call.members)
            groups.setdefault(key, (issue, []))[1].append(difference)
        losses = [loss for loss in self._recorded[0].steps[0].losses if loss.is_mean and loss.scale != 1.0]
        scaled = f"; its loss at {losses[0].line} is a mean times {losses[0].scale:.3g}" if losses else ""
        verdicts = [_make_verdict(same, issue, self._run.record, comparison, scaled) for issue, same in groups.values()]
        return [*verdicts, *self._find_undivided_losses()]

    def _find_undivided_losses(self) -> list[Verdict]:
        """Return a verdict on an update whose gradients add up several mean losses that are not divided; else []."""
        for update, step in enumerate(self._recorded[0].steps[: self._updates]):
            losses = step.losses
            are_means = all(loss.is_mean and loss.scale == 1.0 for loss in losses)
            are_added_up = len(losses) > 1 and all(loss.adds for loss in losses[1:])
            if step.gradients and are_means and are_added_up and len({loss.line for loss in losses}) == 1:
                text = (
                    f"the gradients of update {update + 1} ({step.line}), '{next(iter(step.gradients))}' first, are "
                    f"{len(losses)} times too large: none of the {len(losses)} means of {losses[0].line}, which are "
                    f"added up, is divided by {len(losses)}"
                )
                return [Verdict(kind=KIND, text=text, lines=(losses[0].line, step.line))]
        return []

    def _find_reducing_operation(self, difference: GradientDifference) -> Issue | None:
        """Return the operation that reduced a gradient; if unknown, the last reduction before the update; else None."""
        name, at, record = difference.name, difference.at, self._run.record
        updates = [(rank, each.steps[at]) for rank, each in enumerate(self._recorded) if at < len(each.steps)]
        rank, issued = next(((rank, step.issued) for rank, step in updates if name in step.gradients), (0, 0))
        before = {issue.index: issue for issue in record.issues_of(rank)[:issued] if issue.call.op in _REDUCTIONS}
        own = [each.issue for each in record.transfers if each.issue.rank == rank and name in each.names]
        return next(reversed([issue for issue in own if issue.index in before] or before.values()), None)


_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(slots=True)
class GradientDifference:
    """A gradient that differs between two runs."""

    name: str
    at: int  # number of the update, from 0
    factor: float  # it is this many times too large; 0: its elements have no common factor
    line: str  # line of the update


def _find_factor(gradient: torch.Tensor, expected: torch.Tensor, largest: float, tolerance: float) -> float | None:
    """Return the factor by which a gradient is too large; None if it is right, 0 if there is no common factor.

    The factor is found by least squares. `largest` is the largest element of all gradients of the update, and
    `tolerance` the relative difference that rounding explains.
    """
    difference = float((gradient - expected).abs().max()) if gradient.numel() else 0.0
    own_largest = float(expected.abs().max()) if expected.numel() else 0.0
    size = float(expected.square().sum())
    factor = float((gradient * expected).sum()) / size if size else 0.0
    rest = float((gradient - factor * expected).norm())
    # A gradient that is tiny against all others is rounding, of which no factor can be told.
    is_factor = rest <= tolerance * float(gradient.norm()) and own_largest > 1e-6 * largest
    if is_factor and abs(factor - 1) <= 3 * tolerance:
        return None
    if is_factor and (gradient.numel() > 1 or own_largest > tolerance * largest):
        return factor
    return None if not math.isfinite(own_largest) or difference <= tolerance * max(own_largest, largest) else 0.0


def _round_factor(factor: float) -> Fraction:
    """Return the ratio of small numbers within 1 % of a factor, such as 1/3 for 0.3332; else the factor to 3 digits."""
    near = Fraction(factor).limit_denominator(64)
    if not factor:
        return near
    return near if near and abs(float(near) / factor - 1) < 0.01 else Fraction(f"{factor:.3g}")


def _make_verdict(
    differences: list[GradientDifference], issue: Issue | None, record: Record, comparison: str, scaled: str
) -> Verdict:
    """Return the verdict on gradients with one factor, reduced by the operation `issue`, if it is known.

    `comparison` names the run that they were compared with; `scaled` is a clause on a loss that is a multiple of a
    mean, or "".
    """
    first, names = differences[0], list(dict.fromkeys(each.name for each in differences))
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    factor, verb = _round_factor(first.factor), "differs from"
    if factor:
        times = max(factor, 1 / factor)
        shown = times if times.denominator == 1 else f"{float(times):.3g}"
        verb = f"is {shown} times too {'large' if factor > 1 else 'small'} against"
    where = f"in update {first.at + 1} ({first.line})"
    text = f"{where} the gradient of '{first.name}'{others} {verb} that of {comparison}"
    scaled = scaled if factor else ""
    if issue is None:
        return Verdict(kind=KIND, text=f"{text}{scaled}", lines=(first.line,))
    members, lines = issue.call.members, tuple(dict.fromkeys((issue.call.site, first.line)))
    text += f"{_reduction_clause(issue, factor)}{_holders_clause(record, first.name, members)}{scaled}"
    return Verdict(kind=KIND, text=text, ranks=members, lines=lines)


def _reduction_clause(issue: Issue, factor: Fraction) -> str:
    """Return a clause on the operation that reduced a gradient, and on its divisor; see `_make_verdict`."""
    size = len(issue.call.members)
    # A mean over 4 ranks that is twice too large was divided by 2.
    divisor = size / factor if factor else Fraction(size)
    if divisor.denominator > 1 or divisor == size:
        reduced = "reduced over"
    elif divisor > size:
        reduced = f"divided by {divisor}, where its group has {size} ranks,"
    else:
        reduced = f"divided by {divisor} of the {size} ranks of its group," if divisor > 1 else "not divided by"
    return f": {reduced} {named_ranks(issue.call.members)}, by {issue.title}"


def _holders_clause(record: Record, name: str, members: tuple[int, ...]) -> str:
    """Return "; ranks ... hold the same part" if these are not the ranks that reduced the gradient; otherwise ""."""
    weights = {first.rank: first.weights[name] for first in record.first_forwards if name in first.weights}
    if members[0] not in weights:
        return ""
    same = sorted(rank for rank, weight in weights.items() if weight.digest == weights[members[0]].digest)
    return f"; {named_ranks(same)} hold the same part" if same != sorted(members) else ""
