"""Expert parallel: a layer of many perceptrons on many ranks, of which every token passes few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypedDict, cast

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .layers import Cost, Layer, Pair, check_backward, issue_forward
from .routing import Routing, by_token, mean_gradients, merge, route, route_backward, run_experts, split_gradient
from .tree import pick
from .work import users_frame

if TYPE_CHECKING:
    from .tree import Array


class LeftForBackward(TypedDict):
    """Values that forward leaves for backward."""

    routed: Future[object]  # Future of where the tokens of this rank went
    table: Array  # Rows from every rank to every expert, (n, E)
    load: object  # Rows to every expert, (E,), or a future of them, for the balance
    outputs: object  # Future of the experts' outputs for this rank's tokens, in sorted rows
    saved: object  # Future of the values that each expert of this rank has kept
    shared: object  # Values that the shared expert has kept


class Experts:
    """A mixture of experts, spread evenly over a group: rank r has the experts r*E/n to (r+1)*E/n.

    Each token goes to the `top_k` experts that the router finds most probable, wherever these are, by an all-to-all of
    as many rows as there are; the outputs come back by another, and are added up by gates. No token is dropped.
    The weights are {"router": (h, E), "experts": [each of this rank], "shared": if there is one}.

    Forward waits once, for the other ranks' counts; the `shared` expert, which all tokens pass, is computed meanwhile
    and while the rows travel. Backward waits for nothing: the router's gradient and the shared expert's are computed
    while the first all-to-all travels, and with halves of backward the gradients of the experts' weights under the
    second.

    Gradients: with a loss that is the mean over a rank's tokens, the gradients of the experts are divided by the size
    of the group, which makes them gradients of the mean over all ranks. Average them further over the ranks that have
    the same experts, if there are such; the router's and the shared expert's over all ranks, as in any data parallel
    layer.

    Bytes sent by each rank: T*k*h elements times (n-1)/n, in each of two all-to-alls forward and two backward, if the
    load is balanced. It needs data: the counts are the router's.
    """

    rank: Rank
    group: Group
    experts: int
    top_k: int
    shared: Layer | None

    def __init__(
        self,
        rank: Rank,
        group: Group,
        forward: Callable[..., Pair],
        backward: Callable[..., Pair] | None = None,
        *,
        experts: int,
        top_k: int = 1,
        backward_input: Callable[..., Pair] | None = None,
        backward_weights: Callable[..., object] | None = None,
        shared: Layer | None = None,
        normalised: bool = False,
        balance: float = 0.0,
        balance_over: Group | None = None,
        costs: Mapping[str, Cost] | None = None,
    ) -> None:
        """Describe the layer.

        Args:
            rank: This rank.
            group: The ranks that share the experts.
            forward: Forward of one expert, a plain function of its weights and rows, to equally many rows of the same
                width, and the values that backward needs. Experts without rows are not called, and have zero gradients.
            backward: Backward of one expert, as for `Local`.
            experts: E, over all ranks.
            top_k: How many of them each token passes.
            backward_input: The first half of `backward`, as for `Local`.
            backward_weights: The second half.
            shared: A layer that all tokens pass besides.
            normalised: Whether the gates of a token are made to add up to 1.
            balance: How strongly the router is to spread tokens: the gradient of `balance` * E * sum of f_e P_e, with
                the share f of rows and the mean probability P of each expert, is added (0.01 in arXiv 2101.03961).
            balance_over: The ranks whose rows are counted for f, such as all; by default `group`.
            costs: On the virtual clock: of "route", and of "forward", "backward" or its halves for a single row.
                Sorting rows takes no time there.

        Raises:
            UsageError: If the experts do not divide by the ranks, `top_k` is none of 1 to E, or a backward is missing.
        """
        if not isinstance(experts, int) or experts < 1 or experts % group.size:
            raise UsageError(
                f"experts: {experts!r} do not divide by the {group.size} ranks of group '{group.name}'; "
                f"choose a multiple of {group.size}"
            )
        if not isinstance(top_k, int) or not 1 <= top_k <= experts:
            raise UsageError(f"top_k: expected 1 to {experts}, the number of experts, got {top_k!r}")
        check_backward(backward, backward_input, backward_weights)
        self.rank, self.group, self.experts, self.top_k, self.shared = rank, group, experts, top_k, shared
        self._normalised, self._costs = normalised, dict(costs or {})
        self._balance, self._balance_over = balance, balance_over
        self._forward, self._backward = forward, backward
        self._backward_input, self._backward_weights = backward_input, backward_weights
        each = experts // group.size
        self._own_experts = slice(group.rank * each, (group.rank + 1) * each)

    def load(self, kept: object) -> Array:
        """Return how many rows each expert was sent by all ranks, (E,): whether the router spreads them."""
        table: Array = cast("LeftForBackward", kept)["table"]
        return cast("Array", table.sum(0))

    async def forward(self, w: object, x: object) -> Pair:
        """Issue the layer for this rank's tokens, (..., h); waits for the counts of all ranks."""
        routed = self._issue("route", route, pick(w, ("router",)), x, self.top_k, self._normalised)
        counts = self.group.all_gather(routed[2], name="rows for each expert", call_site=users_frame())
        load: object = None
        if self._balance and self._balance_over is not None:
            load = self._balance_over.all_reduce(routed[2], name="rows for all experts")
        shared, kept_shared = (None, None)
        if self.shared is not None:
            shared, kept_shared = await issue_forward(self.shared, pick(w, ("shared",)), x)
        table = (await counts).reshape(self.group.size, self.experts)
        there, back = self._row_counts(table)
        received = self._exchange(routed[1], there, "tokens to experts")
        rows = int(there[:, self.group.rank].sum())
        both = self._issue(
            "forward",
            partial(run_experts, self._forward),
            table[:, self._own_experts],
            pick(w, ("experts",)),
            None,
            received,
            rows=rows,
        )
        outputs = self._exchange(both[0], back, "outputs to tokens")
        y = self._arrange("merge", _merge_outputs, routed, outputs, shared)
        kept: LeftForBackward = {
            "routed": routed, "table": table, "load": table.sum(0) if load is None else load,
            "outputs": outputs, "saved": both[1], "shared": kept_shared,
        }  # fmt: skip
        return y, kept

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward pass of the layer: gradients of tokens and weights; waits for nothing."""
        saved = cast("LeftForBackward", kept)
        there, back = self._row_counts(saved["table"])
        split = self._arrange("split gradient", _split_gradient, saved["routed"], saved["outputs"], dy)
        received = self._exchange(split[0], there, "gradients to experts")
        chosen = self._issue("route", self._route_backward, pick(w, ("router",)), saved["routed"], saved["load"], split)
        dx_shared, dw_shared = None, None
        if self.shared is not None:
            dx_shared, dw_shared = self.shared.backward(pick(w, ("shared",)), saved["shared"], dy)
        d_rows, dw = self._issue_experts_backward(w, saved, received, back)
        dx = self._arrange("merge", _token_gradient, saved["routed"], d_rows, chosen[0], dx_shared)
        gradients = {"router": chosen[1], "experts": dw}
        return dx, gradients | ({} if self.shared is None else {"shared": dw_shared})

    def _issue_experts_backward(self, w: object, left: LeftForBackward, received: object, back: Array) -> Pair:
        """Issue the experts' backward; return futures of the gradients of rows and weights."""
        weights, table = pick(w, ("experts",)), left["table"][:, self._own_experts]
        rows, saved = int(table.sum()), left["saved"]
        if self._backward_input is None:
            both = self._issue("backward", self._run_backward, table, weights, saved, received, rows=rows)
            return self._exchange(both[0], back, "gradients to tokens"), both[1]
        halves = partial(run_experts, self._backward_input)
        first = self._issue("backward_input", halves, table, weights, saved, received, rows=rows)
        d_rows = self._exchange(first[0], back, "gradients to tokens")
        return d_rows, self._issue("backward_weights", self._run_weight_gradients, weights, first[1], rows=rows)

    def _row_counts(self, table: Array) -> tuple[Array, Array]:
        """Return how many rows go from rank to rank, (n, n): tokens to experts, and outputs back."""
        there = table.reshape(self.group.size, self.group.size, -1).sum(-1)
        return there, there.T

    def _issue(self, name: str, function: Callable[..., object], *args: object, rows: int = 1) -> Future[object]:
        """Issue a compute at the cost of its name times `rows`, on the virtual clock."""
        cost = {unit: each * rows for unit, each in self._costs.get(name, {}).items()}
        return self.rank.compute(function, *args, name=name, call_site=users_frame(), **cost)  # type: ignore[arg-type]

    def _exchange(self, rows: object, counts: Array, name: str) -> Future[object]:
        """Issue an all-to-all of rows between experts and tokens, `counts[i, j]` rows from rank i to rank j."""
        exchanged = self.group.all_to_all(cast("Array", rows), counts=counts, name=name, call_site=users_frame())
        return cast("Future[object]", exchanged)

    def _arrange(self, name: str, function: Callable[..., object], *args: object) -> Future[object]:
        """Issue a compute that sorts and adds rows, which takes no time on the virtual clock."""
        return self.rank.compute(function, *args, name=name, seconds=0.0, call_site=users_frame())

    def _run_backward(self, table: Array, weights: Sequence[object], saved: Sequence[object], d_out: Array) -> Pair:
        """Return the gradients of the rows, and the mean gradients of each expert's weights."""
        assert self._backward is not None
        dx, gradients = run_experts(self._backward, table, weights, saved, d_out)
        return dx, mean_gradients(self.group.size, weights, cast("list[object]", gradients))

    def _run_weight_gradients(self, weights: Sequence[object], needed: Sequence[object]) -> list[object]:
        """Return the mean gradients of the weights of each expert, by the second half of its backward."""
        assert self._backward_weights is not None
        gradients = [
            None if kept is None else self._backward_weights(w, kept) for w, kept in zip(weights, needed, strict=True)
        ]
        return mean_gradients(self.group.size, weights, gradients)

    def _route_backward(self, router: Array, routed: tuple[Routing, object, object], load: Array, split: Pair) -> Pair:
        """Return the gradients of tokens and router, including the router's balance of load."""
        d_balance = None
        if self._balance:
            d_balance = self._balance * self.experts / len(routed[0].x) * load / load.sum()
        return route_backward(router, routed[0], cast("Array", split[1]), d_balance)


def _merge_outputs(routed: tuple[Routing, object, object], outputs: Array, shared: Array | None) -> Array:
    """Return the outputs of a token's experts added up by gates, plus the shared expert's."""
    y = merge(routed[0], outputs)
    return y if shared is None else y + shared


def _split_gradient(routed: tuple[Routing, object, object], outputs: Array, dy: Array) -> Pair:
    return split_gradient(routed[0], outputs, dy)


def _token_gradient(
    routed: tuple[Routing, object, object], d_rows: Array, d_choice: Array, d_shared: Array | None
) -> Array:
    """Add up the gradients of every token: from its experts, its router, and the shared expert."""
    routing = routed[0]
    dx: Array = (by_token(routing, d_rows).sum(1) + d_choice).reshape(routing.shape)
    return dx if d_shared is None else dx + d_shared
