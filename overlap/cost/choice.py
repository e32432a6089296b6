"""Choice of the algorithm for each call of a world, in real and in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..collectives.generators import GENERATORS, fits
from ..collectives.kinds import Collective
from ..collectives.schedule import IN_RANK_ORDER
from ..errors import ScheduleError
from .select import DIRECT, Plan, plan, size_class
from .symmetry import congruence_key

if TYPE_CHECKING:
    from topology import Cluster

    from ..collectives.call import Call


class Choices:
    """Chooses the algorithm of each call of one world, and remembers the choices.

    Args:
        cluster: The machine.
        algorithm: Name of the algorithm to use wherever it exists, unless a call names another; None leaves the choice
            to the cost.
        peer_direct: Whether network adapters read device memory themselves.
        programs_only: Whether the short cut through shared memory is left out.
    """

    def __init__(
        self,
        cluster: Cluster,
        algorithm: str | None,
        *,
        peer_direct: bool = True,
        programs_only: bool = False,
    ) -> None:
        self._cluster, self._algorithm = cluster, algorithm
        self._peer_direct, self._programs_only = peer_direct, programs_only
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._best: dict[tuple[object, ...], str] = {}

    def plan(self, call: Call, members: tuple[int, ...], *, like: str = "") -> Plan:
        """Return the plan of a call, for the largest size of the call's size class (see `select.size_class`).

        Args:
            call: Call of the ranks.
            members: World ranks in group order.
            like: Name of the algorithm that similar groups use; "": none is known.

        Raises:
            TopologyError: The group is illegal on the machine, or no wire joins its ranks.
        """
        chosen_by = call.kind, size_class(call.nbytes), call.dtype, call.root, call.pairs, call.exact, call.algorithm
        plan_ = self._plans.get((chosen_by, members))
        if plan_ is None:
            plan_ = self._plans[chosen_by, members] = self._choose_plan(chosen_by, call, members, like)
        return plan_

    def _choose_plan(self, chosen_by: tuple[object, ...], call: Call, members: tuple[int, ...], preferred: str) -> Plan:
        """Return the plan of a call, with a named algorithm, or with the cheapest one.

        The name is the call's, else that of similar groups (`preferred`, "" if none), else that of the world's
        settings. The cheapest algorithm is taken if there is no name, if the collective does not have the algorithm or
        it does not take this number of ranks, if `exact` requires another order than its, or if it is a short cut that
        does not apply. `chosen_by` is the key of `_best`: all values of the call that can change the choice.
        """
        # A barrier is planned as an all-reduce.
        op = "all_reduce" if call.kind is Collective.BARRIER else call.kind.value
        choose = partial(
            plan,
            op,
            size_class(call.nbytes),
            self._cluster,
            members,
            dtype="uint8" if call.dtype is None else str(call.dtype),
            root=call.root,
            pairs=call.pairs if call.kind is Collective.PERMUTE else None,
            peer_direct=self._peer_direct,
            exact=call.exact,
        )
        algorithm = call.algorithm or preferred or self._algorithm
        choices = GENERATORS[op] if self._programs_only else (DIRECT, *GENERATORS[op])
        if algorithm is None or algorithm not in choices or (call.exact and algorithm not in IN_RANK_ORDER):
            return self._cheapest_plan(choose, chosen_by, members)
        try:
            return choose(algorithm=algorithm)
        except ScheduleError:
            if algorithm == DIRECT or not fits(algorithm, len(members)):
                return self._cheapest_plan(choose, chosen_by, members)
            # The algorithm does not fit these wires; its plain form still takes this number of ranks.
            return choose(algorithm=algorithm, plain=True)

    def _cheapest_plan(
        self, choose: Callable[..., Plan], chosen_by: tuple[object, ...], members: tuple[int, ...]
    ) -> Plan:
        """Return the cheapest plan. A group placed like an earlier one gets that group's algorithm.

        A comparison of all algorithms would take ten times as long. `choose` is `plan`, with all arguments but the
        algorithm and `programs_only`; for `chosen_by` see `_choose_plan`.
        """
        choose = partial(choose, programs_only=self._programs_only)
        key = chosen_by, congruence_key(self._cluster, members)
        algorithm = self._best.get(key)
        if algorithm is not None:
            return choose(algorithm=algorithm)
        cheapest = choose()
        self._best[key] = cheapest.algorithm
        return cheapest
