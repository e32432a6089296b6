"""Local SGD and DiLoCo: ranks train apart, and outer reductions run under the next inner steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from .buckets.gradients import check_gradient, is_finite, not_finite
from .buckets.plan import plan_by_dtype
from .checkpoints.names import Own
from .checkpoints.pieces import Shard, Tensors, share_pieces
from .fragment import Fragment
from .optimizers import SGD, Nesterov, Optimizer, check_optimizer
from .parameters import Parameters
from .settings import check_count
from .strategy import Ahead, Strategy
from .tree import Params, Site, flatten
from .work import users_frame

if TYPE_CHECKING:
    from .tree import Array

_OUTER = "outer "  # begins the names of the outer optimizer's state


class LocalSteps(Strategy[Params]):
    """A model that each rank of a group trains by itself, and that they bring together once in a period.

    It is used as `DataParallel` is: `reduce` hands a gradient over for the next inner step of this rank, and
    `model[name]` is its newest weight, which changes with the next `step`. Inner steps send nothing. At the end of a
    period each rank sends the difference between its own weights and the last common ones; the mean of that is the
    gradient of an outer optimizer. It travels under the next `delay` inner steps, whose progress is kept: the outer
    step is added to it. With fragments, parts of the weights take turns, each once in a period: as many bytes, at most
    1 / fragments of them at once.

    The inner optimizer's state is each rank's own, and stays. Bytes sent per rank and inner step: 2 (n-1) / n of the
    weights, divided by the period; `DataParallel` sends that in each step.

    Attributes:
        rank: The rank that it runs on.
        group: The ranks that train it.
        steps: How many inner steps there have been.
    """

    period: int
    delay: int
    steps: int

    def __init__(
        self,
        rank: Rank,
        params: Params,
        *,
        optimizer: Optimizer,
        outer: Optimizer,
        period: int,
        delay: int = 1,
        fragments: int = 1,
        group: Group | None = None,
        ahead: int = 2,
    ) -> None:
        """Take the weights over: copies of `params` of the group's first rank.

        Args:
            rank: This rank.
            params: A dict, list or tuple of arrays, nested as you like; the same names, shapes and dtypes on all ranks.
            optimizer: Optimizer of inner steps.
            outer: Optimizer of outer steps; its gradient is the mean change, with the sign of one.
            period: Inner steps from one outer step to the next.
            delay: Inner steps under which the outer reduction travels; 0 waits for it. Less than the period.
            fragments: In how many parts the weights take turns; every n-th parameter is in one. It divides the period.
            group: Ranks to train with; by default all.
            ahead: How many steps the program may be ahead of its computes where it does `await model.step()`.

        Raises:
            UsageError: If an argument is invalid.
        """
        leaves = flatten(params)
        _check_arguments(period=period, delay=delay, fragments=fragments, ahead=ahead, parameters=len(leaves))
        check_optimizer("optimizer", optimizer)
        check_optimizer("outer", outer)
        super().__init__(rank, params, group, ahead)
        self.period, self.delay = period, delay
        self._parameters, self._common = Parameters(rank, leaves, optimizer), Parameters(rank, leaves, outer)
        self._stream = rank.stream(f"outer steps of {self.group.name}")
        self._fragments = [
            Fragment(plan, self._parameters, self._common, sends_at=(number + 1) * period // fragments % period)
            for number in range(fragments)
            for plan in plan_by_dtype(self._leaves, list(leaves)[number::fragments])
        ]
        self._handed: dict[str, object] = {}
        self._sites: dict[str, Site] = {}  # lines that handed them over
        first = self._broadcast_first_weights(self._parameters)
        self._newest: Future[dict[str, Array]] = self._work.compute(
            self._copy_first_weights, *first, name="first weights"
        )

    def _copy_first_weights(self, *_: object) -> dict[str, Array]:
        """Copy the first weights into the common ones, and return this rank's weights by name."""
        if self._parameters.real:
            for common, own in zip(self._common.weights.values(), self._parameters.weights.values(), strict=True):
                common.flat[:] = own.flat
        return self._parameters.views

    # -- the loop ----------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> Array | Future[object]:
        """Return the newest weight; a future of it while a step is under way."""
        newest = self._newest
        return self._parameters.views[name] if newest.done and not newest.failed else newest[name]

    def _take(self, gradients: Mapping[str, object], site: Site) -> None:
        """Keep the gradients for the next inner step; refuse a second one of a parameter."""
        for name, gradient in gradients.items():
            if name in self._handed:
                raise self._duplicate_error(name)
            self._handed[name], self._sites[name] = gradient, site

    def step(self) -> Ahead:
        """Let this rank's weights make an inner step; begin and end outer steps that are due. Issues, and never waits.

        Returns:
            An awaitable that keeps the program at most `ahead` steps ahead of its computes.

        Raises:
            UsageError: If a parameter has had no gradient.
        """
        missing = [name for name in self._leaves if name not in self._handed]
        if missing:
            raise UsageError(f"step: no gradient of {', '.join(map(repr, missing))} in step {self.steps}; hand it over")
        self._note_first_step()
        self.steps += 1
        moved_bytes = sum(self._parameters.moved_bytes(each.plan) for each in self._parameters.weights.values())
        gradients, self._handed = self._handed, {}
        update, self._sites = partial(self._make_inner_step, self.steps, self._sites), {}
        self._newest = self._work.compute(update, gradients, name="update", role="update", moved_bytes=moved_bytes)
        for fragment in self._fragments:
            self._issue_outer_update_if_due(fragment)
            if self.steps % self.period == fragment.sends_at:
                self._send_change(fragment)
                self._issue_outer_update_if_due(fragment)
        return Ahead(self._limit([cast("Future[object]", self._newest)]))

    async def finish(self) -> Params:
        """End with an outer step, so that all ranks have the same weights, and wait for it; then go on, if you like.

        Returns:
            The weights, in a tree like `params`; the arrays are the model's own.
        """
        for fragment in self._fragments:
            self._issue_outer_update(fragment)
            if fragment.sent_at < self.steps:
                self._send_change(fragment)
                self._issue_outer_update(fragment)
        await self._newest
        return self._tree(self._parameters.views)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Return dtype and shape of the common weights and of the outer optimizer's state, by name."""
        return self._common.tensors(_OUTER)

    def kept(self) -> list[Shard]:
        """Return the pieces that this rank saves of the common weights and state."""
        return share_pieces(self.wanted(), self.group.rank, self.group.size)

    def wanted(self) -> list[Shard]:
        """Return the pieces of the common weights and state, which all ranks read."""
        return self._common.pieces(_OUTER)

    def notes(self) -> dict[str, object]:
        """Return the counters of the outer steps of each fragment, which are equal on all ranks."""
        return {"fragments": [fragment.notes() for fragment in self._fragments]}

    def own(self) -> dict[str, Array]:
        """Return this rank's weights, the inner optimizer's state, and outer steps under way."""
        arrays = {f"weights:{piece.tensor}": piece.data for piece in self._parameters.pieces()}
        for number, fragment in enumerate(self._fragments):
            arrays |= {f"fragment:{number}:{key}": array for key, array in fragment.arrays_under_way().items()}
        return arrays

    async def settle(self) -> None:
        """Wait until all issued steps are made, and outer reductions under way are over."""
        await self._newest
        for fragment in self._fragments:
            if fragment.pending is not None:
                await fragment.pending

    def resume(self, steps: int, notes: Mapping[str, object], arrays: Own | None) -> str:
        """Go on from that step, by the arguments of `Checkpointed`.

        If other ranks have saved it, all begin with the common weights, and inner optimizers anew.
        """
        self.steps = steps
        saved = cast("Sequence[Mapping[str, object]]", notes["fragments"])
        if len(saved) != len(self._fragments):
            raise UsageError(f"fragments: expected {len(saved)}, as in the checkpoint, got {len(self._fragments)}")
        if arrays is not None:
            for piece in self._parameters.pieces():
                piece.data[:] = arrays[f"weights:{piece.tensor}"]
        for number, (fragment, counters) in enumerate(zip(self._fragments, saved, strict=True)):
            start, parts = f"fragment:{number}:", None
            if arrays is not None:
                parts = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
            fragment.resume(counters, parts, self._work)
        return "the progress of each rank since its last outer step is lost" if arrays is None else ""

    # -- steps -----------------------------------------------------------------------------------------------------

    def _make_inner_step(self, step: int, sites: Mapping[str, Site], gradients: dict[str, Array]) -> dict[str, Array]:
        """Check gradients and let the inner optimizer make a step; return this rank's weights by name."""
        for name, gradient in gradients.items():
            check_gradient(name, gradient, *self._leaves[name], step, sites[name])
            if self._parameters.real and not is_finite(gradient.reshape(-1)):
                raise not_finite({name: gradient}, rank=self.rank.rank, step=step, site=sites[name])
        self._parameters.make_step(gradients, step)
        return self._parameters.views

    def _send_change(self, fragment: Fragment) -> None:
        """Issue the mean over ranks of the change of a fragment since its last outer step."""
        nbytes = fragment.plan.nbytes
        change = self._work.compute(fragment.change, name="change", moved_bytes=4 * nbytes)
        fragment.sent_at, fragment.due = self.steps, self.steps + self.delay
        fragment.pending = change
        if self.group.size > 1:
            fragment.pending = self.group.all_reduce(
                change, op="mean", stream=self._stream, name=RoleName("outer step", "bucket"), call_site=users_frame()
            )

    def _issue_outer_update_if_due(self, fragment: Fragment) -> None:
        """Issue the outer step of a fragment whose delay is over."""
        if fragment.due <= self.steps:
            self._issue_outer_update(fragment)

    def _issue_outer_update(self, fragment: Fragment) -> None:
        """Issue the outer step of a fragment with the mean change under way; without one, do nothing."""
        pending, fragment.pending = fragment.pending, None
        if pending is None:
            return
        fragment.rounds += 1
        step = partial(fragment.make_outer_step, fragment.rounds, fragment.sent_at < self.steps)
        self._newest = self._work.compute(
            step, pending, name="outer update", role="update", moved_bytes=4 * fragment.plan.nbytes
        )


class LocalSGD(LocalSteps[Params]):
    """Local SGD: all ranks average their weights once in a period.

    Stich, "Local SGD converges fast and communicates little", arXiv:1805.09767; with a delay, as in Overlap Local-SGD
    (Wang, Liang, Joshi, arXiv:2002.09539) without its momentum.
    """

    def __init__(
        self,
        rank: Rank,
        params: Params,
        *,
        optimizer: Optimizer,
        period: int = 16,
        delay: int = 1,
        fragments: int = 1,
        group: Group | None = None,
        ahead: int = 2,
    ) -> None:
        """Take the weights over; arguments as for `LocalSteps`. 16 steps as in Lin et al., arXiv:1808.07217."""
        super().__init__(
            rank, params, optimizer=optimizer, outer=SGD(1.0), period=period, delay=delay, fragments=fragments,
            group=group, ahead=ahead,
        )  # fmt: skip


class DiLoCo(LocalSteps[Params]):
    """DiLoCo: many inner steps, and outer ones with Nesterov's momentum.

    Douillard et al., "DiLoCo: distributed low-communication training of language models", arXiv:2311.08105; with
    fragments and a delay as in its streaming form, arXiv:2501.18512, but for the way in which an outer step comes in:
    here the steps made meanwhile are kept whole, there it is mixed with them.
    """

    def __init__(
        self,
        rank: Rank,
        params: Params,
        *,
        optimizer: Optimizer,
        outer: Optimizer | None = None,
        period: int = 500,
        delay: int = 1,
        fragments: int = 1,
        group: Group | None = None,
        ahead: int = 2,
    ) -> None:
        """Take the weights over; arguments as for `LocalSteps`. `outer` is `Nesterov(0.7, 0.9)` by default."""
        super().__init__(
            rank, params, optimizer=optimizer, outer=outer or Nesterov(), period=period, delay=delay,
            fragments=fragments, group=group, ahead=ahead,
        )  # fmt: skip


def _check_arguments(*, period: int, delay: int, fragments: int, ahead: int, parameters: int) -> None:
    """Refuse numbers that do not fit each other: delay below period, fragments that divide the period."""
    for name, value, least in (("period", period, 1), ("delay", delay, 0), ("fragments", fragments, 1)):
        check_count(name, value, least=least)
    check_count("ahead", ahead, least=0)
    if delay >= period:
        raise UsageError(f"delay: expected less than the period of {period}, got {delay}")
    if period % fragments:
        raise UsageError(f"fragments: expected a number that divides the period of {period}, got {fragments}")
    if fragments > parameters:
        raise UsageError(f"fragments: expected at most one for each of the {parameters} parameters, got {fragments}")
