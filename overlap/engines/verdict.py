"""Verdict on an attempt of a gang: the first failure, from the reports of its members and of the engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from transports import TransportError

from ..errors import OverlapError, PeerError, PeerLostError, RankFailedError, UsageError
from ..processes.status import Guilt, status_from_error
from .gang import GangOutcome, GangSpec, MemberEnd


def failure(spec: GangSpec, outcome: GangOutcome) -> OverlapError | None:
    """Return the error with which the gang has ended, or None if all members have given results.

    Errors are ordered by cause, not by time: a member whose own rank failed first, then members that ended because of
    another one, then the engine's reports of lost processes. Those become notes on the error; they are the error itself
    where members only know that the process of their rendezvous is lost.
    """
    failed = [end for end in outcome.ends.values() if end.error is not None]
    chosen = min(failed, key=lambda end: _guilt(spec, end), default=None)
    if chosen is not None and not (outcome.lost and isinstance(chosen.error, PeerError)):
        assert chosen.error is not None
        return _with_notes(chosen.error, spec, outcome.lost)
    if not outcome.lost:
        stopped = [end.member for end in outcome.ends.values() if end.results is None]
        return None if not stopped else _lost_error(spec, {stopped[0]: "was told to stop"})
    return _lost_error(spec, outcome.lost)


def find_lost_member(spec: GangSpec, end: MemberEnd) -> int | None:
    """Return the member that another member has lost, and that will send no report; None if it has lost none."""
    error = end.error
    if isinstance(error, RankFailedError) and isinstance(error.cause, PeerLostError) and error.rank >= 0:
        return spec.member_of(error.rank)
    return None


def blamed_members(spec: GangSpec, ends: Mapping[int, MemberEnd]) -> set[int]:
    """Return the members without a report that other members have lost."""
    blamed = {find_lost_member(spec, end) for end in ends.values()}
    return {member for member in blamed if member is not None and member not in ends}


def _guilt(spec: GangSpec, end: MemberEnd) -> tuple[bool, Guilt, bool]:
    """Return the rank of a member's error in the order of guilt, the guiltiest first."""
    error, local = end.error, spec.ranks(end.member)
    assert error is not None
    wire = isinstance(error, RankFailedError) and isinstance(error.cause, TransportError)  # before the process is lost
    return not isinstance(error, UsageError), status_from_error(error, local=local).guilt, wire


def _lost_error(spec: GangSpec, lost: Mapping[int, str]) -> OverlapError:
    """Return the error of a gang in which no member could report the failed one."""
    member = next(iter(lost))
    ranks = spec.ranks(member)
    cause = PeerLostError(f"its process on {spec.engine} {lost[member]}", culprit=ranks[0])
    world_size = spec.members * spec.ranks_each
    error = RankFailedError(rank=ranks[0], cause=cause, where="", doing=(), others={}, world_size=world_size)
    error.__cause__ = cause
    return error


def _with_notes(error: OverlapError, spec: GangSpec, lost: Mapping[int, str]) -> OverlapError:
    """Return an error with a note for each process without a report."""
    for member, why in lost.items():
        ranks = spec.ranks(member)
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        note = f"the process of {label} {why}"
        with suppress(AttributeError):
            if note in error.__notes__:
                continue
        error.add_note(note)
    return error
