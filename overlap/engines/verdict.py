"""Verdict on an attempt of a gang: the first failure, from the words of its members and of the engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from transports import TransportError

from ..errors import OverlapError, PeerError, PeerLostError, RankFailedError, UsageError
from ..processes.status import Guilt, status_of
from .gang import GangOutcome, GangSpec, MemberEnd


def failure(spec: GangSpec, outcome: GangOutcome) -> OverlapError | None:
    """Return the error with which the gang has ended, or None if all members have given results.

    By cause, not by clock: a member that says that its own rank began it beats members that ended because of another,
    and these beat what the engine says of processes that are gone. What the engine says becomes a note on it. It is the
    error where members know no more than that the process is gone in which they were to meet.
    """
    told = [end for end in outcome.ends.values() if end.error is not None]
    chosen = min(told, key=lambda end: _guilt(spec, end), default=None)
    if chosen is not None and not (outcome.lost and isinstance(chosen.error, PeerError)):
        assert chosen.error is not None
        return _with_notes(chosen.error, spec, outcome.lost)
    if not outcome.lost:
        stopped = [end.member for end in outcome.ends.values() if end.results is None]
        return None if not stopped else _lost(spec, {stopped[0]: "was told to stop"})
    return _lost(spec, outcome.lost)


def lost_member(spec: GangSpec, end: MemberEnd) -> int | None:
    """Return the member that another one has lost, and that will tell nothing itself; None if it has lost none."""
    error = end.error
    if isinstance(error, RankFailedError) and isinstance(error.cause, PeerLostError) and error.rank >= 0:
        return spec.member_of(error.rank)
    return None


def _guilt(spec: GangSpec, end: MemberEnd) -> tuple[bool, Guilt, bool]:
    """Return the place of a member's error in the order of guilt."""
    error, local = end.error, spec.ranks(end.member)
    assert error is not None
    wire = isinstance(error, RankFailedError) and isinstance(error.cause, TransportError)  # before the process is lost
    return not isinstance(error, UsageError), status_of(error, local=local).guilt, wire


def _lost(spec: GangSpec, lost: Mapping[int, str]) -> OverlapError:
    """Return the error of a gang none of whose members could say who failed."""
    member = next(iter(lost))
    ranks = spec.ranks(member)
    cause = PeerLostError(f"its process on {spec.engine} {lost[member]}", culprit=ranks[0])
    world_size = spec.members * spec.ranks_each
    error = RankFailedError(rank=ranks[0], cause=cause, where="", doing=(), others={}, world_size=world_size)
    error.__cause__ = cause
    return error


def _with_notes(error: OverlapError, spec: GangSpec, lost: Mapping[int, str]) -> OverlapError:
    for member, why in lost.items():
        ranks = spec.ranks(member)
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        note = f"the process of {named} {why}"
        with suppress(AttributeError):
            if note in error.__notes__:
                continue
        error.add_note(note)
    return error
