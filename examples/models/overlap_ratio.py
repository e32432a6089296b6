"""The verdict of a training run: how much it communicated, and how much of that was hidden under compute."""

from collections.abc import Sequence

from overlap.timeline import Recorder, Timeline, breakdowns


def describe_overlap(recorders: Sequence[Recorder]) -> str:
    """Return one sentence about the ranks of this process, from their recorded spans.

    Communication counts from when a rank comes to an operation: waiting for slower ranks is part of it.
    """
    times = breakdowns(Timeline.collect(recorders, world_size=len(recorders)))
    hidden_ns, comm_ns = sum(each.overlapped_ns for each in times), sum(each.comm_ns for each in times)
    if not comm_ns:  # one rank
        return "overlap: nothing was communicated"
    mean_ms = comm_ns / len(times) / 1e6
    return f"overlap: {hidden_ns / comm_ns:.0%} of {mean_ms:.0f} ms of communication was hidden under compute"


def reduced_bytes(recorder: Recorder) -> int:
    """Return how many bytes a rank has given to all-reduces."""
    infos = [span.info for span in recorder.spans() if span.info is not None]
    return sum(info.nbytes for info in infos if info.op == "all_reduce")
