"""Which tokens go to which experts: pure functions on arrays, for a mixture of experts.

Letters: T tokens of width h on this rank, E experts over all ranks, each token goes to k of them; n ranks. Sorted rows
are the T*k copies of tokens, by expert and then by token: so those for one rank lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .layers import Pair
from .tree import map_leaves

if TYPE_CHECKING:
    from .tree import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of a rank go."""

    x: Array  # The tokens, (T, h)
    shape: tuple[int, ...]  # Shape of the inputs
    probabilities: Array  # Probabilities of the router, (T, E)
    chosen: Array  # The experts of every token, (T, k), the most probable first
    gates: Array  # Factors of the experts' outputs, (T, k)
    order: Array  # Indices, among the T*k copies token by token, of the sorted rows
    normalised: bool  # Whether the gates of a token add up to 1


def route(router: Array, x: Array, k: int, normalised: bool) -> tuple[Routing, Array, Array]:
    """Choose the k most probable experts of each token: softmax(x router), at least in float32.

    Returns:
        The choice; the sorted rows, (T*k, h); how many of them each expert gets, (E,), int64.
    """
    tokens = x.reshape(-1, x.shape[-1])
    scores = tokens.astype(np.result_type(x, np.float32), copy=False) @ router
    p = np.exp(scores - scores.max(-1, keepdims=True))  # less the maximum, so that nothing overflows
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :k]
    gates = np.take_along_axis(p, chosen, 1)
    if normalised:
        gates = gates / gates.sum(-1, keepdims=True)
    order = np.argsort(chosen.reshape(-1), kind="stable")  # by expert; rows of one expert stay in the order of tokens
    counts = np.bincount(chosen.reshape(-1), minlength=router.shape[1]).astype(np.int64)
    routing = Routing(
        x=tokens, shape=x.shape, probabilities=p, chosen=chosen, gates=gates, order=order, normalised=normalised
    )
    return routing, tokens[order // k], counts


def merge(routing: Routing, outputs: Array) -> Array:
    """Return the outputs of each token's experts, weighted by gates and added up, in the shape of the input."""
    y: Array = (by_token(routing, outputs) * routing.gates[:, :, None]).sum(1)
    return y.astype(outputs.dtype).reshape(routing.shape)


def split_gradient(routing: Routing, outputs: Array, dy: Array) -> tuple[Array, Array]:
    """Return the gradients of the outputs, in sorted rows, and the gradients of the gates, (T, k)."""
    token_dy = dy.reshape(len(routing.gates), 1, -1)  # (T, 1, h), for all k experts of a token
    rows = (token_dy * routing.gates[:, :, None]).astype(dy.dtype).reshape(len(routing.order), -1)[routing.order]
    return rows, (token_dy * by_token(routing, outputs)).sum(-1)


def route_backward(router: Array, routing: Routing, d_gates: Array, d_balance: Array | None) -> tuple[Array, Array]:
    """Return the gradients of the tokens, as far as the router's choice depends on them, and of the router.

    Args:
        router: Its weights, (h, E).
        routing: What it has chosen.
        d_gates: The gradient of the gates, (T, k).
        d_balance: The gradient of every token's probabilities that the balance of load asks for, (E,).
    """
    p = routing.probabilities
    if routing.normalised:
        total = np.take_along_axis(p, routing.chosen, 1).sum(-1, keepdims=True)
        # The gates are chosen / total: the derivative of a quotient.
        d_gates = (d_gates - (d_gates * routing.gates).sum(-1, keepdims=True)) / total
    dp = np.zeros_like(p) if d_balance is None else np.broadcast_to(d_balance.astype(p.dtype), p.shape).copy()
    rows = np.arange(len(p))[:, None]
    dp[rows, routing.chosen] += d_gates
    d_scores = p * (dp - (dp * p).sum(-1, keepdims=True))  # the derivative of softmax
    return (d_scores @ router.T).astype(routing.x.dtype), (routing.x.T @ d_scores).astype(router.dtype)


def places_by_expert(table: Array) -> Iterator[Array]:
    """Yield for each local expert the indices of its rows in the received order, [source][expert].

    Args:
        table: Rows from every rank for every expert of this rank, (n, experts of this rank).
    """
    ends = np.cumsum(table.reshape(-1)).reshape(table.shape)
    for expert in range(table.shape[1]):
        spans = [np.arange(ends[i, expert] - table[i, expert], ends[i, expert]) for i in range(len(table))]
        yield np.concatenate(spans)


def by_token(routing: Routing, rows: Array) -> Array:
    """Return rows that are sorted by expert in the order of tokens, (T, k, h)."""
    out = np.empty_like(rows)
    out[routing.order] = rows
    return out.reshape(*routing.gates.shape, -1)


# -- the experts of a rank, on the compute stream ----------------------------------------------------------------------


def run_experts(
    function: Callable[..., Pair],
    table: Array,
    weights: Sequence[object],
    saved: Sequence[object] | None,
    rows: Array,
) -> Pair:
    """Call a function of one expert for each expert of a rank that has rows.

    Args:
        function: From the expert's weights, its item of `saved` if that is given, and its rows to rows of the same
            shape and a value to keep.
        table: Rows from every rank for every expert of this rank, (n, experts of this rank).
        weights: Weights of each expert.
        saved: Values of each expert's forward that its backward needs.
        rows: In the order [source][expert].

    Returns:
        The resulting rows in that order, and of each expert the value to keep; None where there are no rows.
    """
    out, values = np.empty_like(rows), list[object]()
    for expert, places in enumerate(places_by_expert(table)):
        values.append(None)
        if len(places):
            more = () if saved is None else (saved[expert],)
            out[places], values[-1] = function(weights[expert], *more, rows[places])
    return out, values


def mean_gradients(ranks: int, weights: Sequence[object], gradients: Sequence[object]) -> list[object]:
    """Return the gradients of each expert's weights, divided by the number of ranks; zeros for an expert without rows.

    Args:
        ranks: That share the experts.
        weights: Weights of each expert.
        gradients: Gradients of each expert, a tree like its weights; None if it had no rows.
    """
    return [
        map_leaves(np.zeros_like, each)
        if gradient is None
        else map_leaves(lambda array: array / np.asarray(ranks, array.dtype), gradient)
        for each, gradient in zip(weights, gradients, strict=True)
    ]
