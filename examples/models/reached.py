"""The verdict of a training run: how much it communicated, and how much of that was hidden under compute."""

from collections.abc import Sequence

from overlap.timeline import Recorder, Timeline, breakdowns


def reached(recorders: Sequence[Recorder]) -> str:
    """Return one sentence about the ranks of this process, from their recorded spans.

    Communication counts from when a rank comes to an operation: waiting for slower ranks is part of it.
    """
    told = breakdowns(Timeline.collect(recorders, world_size=len(recorders)))
    hidden, all_of_it = (sum(getattr(each, name) for each in told) / len(told) for name in ("overlapped_ns", "comm_ns"))
    return f"overlap: {hidden / all_of_it:.0%} of {all_of_it / 1e6:.0f} ms of communication was hidden under compute"


def reduced_bytes(recorder: Recorder) -> int:
    """Return how many bytes a rank has given to all-reduces."""
    infos = [span.info for span in recorder.spans() if span.info is not None]
    return sum(info.nbytes for info in infos if info.op == "all_reduce")
