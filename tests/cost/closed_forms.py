"""Closed forms: a collective as so many latencies, and shares of its bytes sent and reduced (Hockney's model).

Source: the cost comments of pmodels/mpich:src/mpi/coll and the papers that the generators name. `p` ranks, `n` bytes of
the whole vector. They hold where every step's messages go at full bandwidth, as around a switch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2

from overlap.cost.pipeline import Uses


def apart(phases: int) -> Uses:
    """Return the uses of phases that share no resource: each has one of its own."""
    return tuple(tuple(float(row == column) for column in range(phases)) for row in range(phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """A time as alpha * steps + beta * n * sent + gamma * n * reduced.

    Attributes:
        steps: latencies, one after the other.
        sent: bytes on the critical way, over n.
        reduced: bytes reduced on the critical way, over n.
    """

    steps: int
    sent: float
    reduced: float = 0.0

    def total_s(self, nbytes: float, *, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0) -> float:
        """Return the time for n bytes."""
        per_byte = self.sent * beta_s_per_byte + self.reduced * gamma_s_per_byte
        return self.steps * alpha_s + nbytes * per_byte


Form = Callable[[int], ClosedForm]
SLICES = 8  # of a chain


def _spreading(steps: Callable[[int], int]) -> Mapping[str, Form]:
    """Return the forms of an algorithm that halves an all-reduce in a reduce-scatter and an all-gather."""

    def form(times: int, reduces: int) -> Form:
        return lambda p: ClosedForm(steps=times * steps(p), sent=times * (p - 1) / p, reduced=reduces * (p - 1) / p)

    return {"all_reduce": form(2, 1), "reduce_scatter": form(1, 1), "all_gather": form(1, 0)}


def _log(p: int) -> int:
    return ceil(log2(p))


_SPREADING: Mapping[str, Mapping[str, Form]] = {
    "ring": _spreading(lambda p: p - 1),
    "multi_ring": _spreading(lambda p: p - 1),
    "mesh": _spreading(lambda p: 1),
    "rdh": _spreading(_log),  # for powers of two
    "bruck": _spreading(_log),
}
_FORMS: Mapping[str, Mapping[str, Form]] = {
    **{kind: {name: forms[kind] for name, forms in _SPREADING.items()} for kind in _SPREADING["ring"]},
    "broadcast": {
        "binomial": lambda p: ClosedForm(steps=_log(p), sent=_log(p)),
        "chain": lambda p: ClosedForm(steps=p + SLICES - 2, sent=(p + SLICES - 2) / SLICES),
        "mesh": lambda p: ClosedForm(steps=1, sent=p - 1),
    },
    "reduce": {"binomial": lambda p: ClosedForm(steps=_log(p), sent=_log(p), reduced=_log(p))},
    "all_to_all": {
        "mesh": lambda p: ClosedForm(steps=1, sent=(p - 1) / p),
        "pairwise": lambda p: ClosedForm(steps=p - 1, sent=(p - 1) / p),
        "bruck": lambda p: ClosedForm(steps=_log(p), sent=_log(p) / 2),  # for powers of two
    },
    "gather": {"binomial": lambda p: ClosedForm(steps=_log(p), sent=(p - 1) / p)},  # for powers of two
    "scatter": {"binomial": lambda p: ClosedForm(steps=_log(p), sent=(p - 1) / p)},  # for powers of two
}
_ALL_REDUCE: Mapping[str, Form] = {
    # For powers of two, and one message at a time.
    "recursive_doubling": lambda p: ClosedForm(steps=_log(p), sent=_log(p), reduced=_log(p)),
    "one_shot": lambda p: ClosedForm(steps=1, sent=p - 1, reduced=p - 1),
}


def closed_form(collective: str, algorithm: str, size: int) -> ClosedForm:
    """Return the closed form of an algorithm.

    Args:
        collective: Its name.
        algorithm: Its name.
        size: p; forms marked so in the table are those of powers of two.
    """
    forms = {**_FORMS.get(collective, {}), **(_ALL_REDUCE if collective == "all_reduce" else {})}
    return forms[algorithm](size)
