"""What looking at a run costs: writing, reading, drawing, folding."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time_ns

from overlap.cli.bench.sampling import Sampling, Times
from overlap.timeline import Recorder, Timeline, TimelineView, read_trace, write_trace
from tests.benchmarks.figures import few

from .figures import Figure, time_of

_PART = 20
"""Of a million spans that part is made, and what it takes is multiplied: the whole takes minutes to make."""
_SPANS = 1_000_000 // _PART


def figures(sampling: Sampling) -> Iterator[Figure]:
    """Measure, in time of this process."""
    repeats = min(few(sampling), 3)
    with TemporaryDirectory() as folder:
        file, many = Path(folder, "run.json"), _timeline(8, _SPANS // (8 * 25))
        yield _line("write", "write a trace of a million spans", repeats, lambda: write_trace(many, file), None, _PART)
        yield _line("load", "load a trace of a million spans", repeats, lambda: read_trace(file), 3e9, _PART)
        draw = "draw a run of a million spans, whole, without steps"
        yield _line("draw", draw, repeats, lambda: TimelineView(_again(many)).lines(height=24), 1e9, _PART)
    wide = _timeline(1024, 2)
    yield _line(
        "fold", "fold and draw a step of 1024 ranks", repeats, lambda: TimelineView(wide, step=1).lines(height=24), 2e9
    )


def _line(
    name: str, text: str, repeats: int, run: Callable[[], object], aim_ns: float | None, times: int = 1
) -> Figure:
    def once() -> int:
        begun_ns = process_time_ns()
        run()
        return (process_time_ns() - begun_ns) * times

    return time_of(f"timeline_{name}", text, Times.of_samples([once() for _ in range(repeats)]), aim_ns)


def _again(timeline: Timeline) -> Timeline:
    """The same without steps, as read from a file: no span has been made of it yet."""
    columns = timeline.columns
    return Timeline.of_columns(columns.take(~columns.is_kind("step")), world_size=timeline.world_size)


def _timeline(ranks: int, steps: int, *, layers: int = 12) -> Timeline:
    """Data parallel training, each layer's gradient under the compute of the next; the last rank is late."""
    group = ("world", tuple(range(ranks)))
    recorders = [Recorder(rank, capacity=steps * (2 * layers + 1)) for rank in range(ranks)]
    for recorder in recorders:
        late_ns = 400_000 if recorder.rank == ranks - 1 else 0
        for step in range(steps):
            begin_ns = step * 30_000_000
            for layer in range(layers):
                at_ns = begin_ns + layer * 2_000_000
                start_ns, met_ns = at_ns + late_ns + 1_950_000, at_ns + 2_350_000
                place = ("train.py:12", 0, at_ns, step)
                recorder.append(("compute", "compute", f"backward {layer}", at_ns + late_ns, start_ns - 50_000, place))
                match = ("all_reduce", "ring", group, step * layers + layer, 1 << 20, "float32", met_ns)
                info = (match, start_ns - 50, 0, "train.py:13", 0, step)
                recorder.append(("comm", "comm", "all_reduce", start_ns, met_ns + 1_500_000, info))
            recorder.append(("step", "step", f"step {step}", begin_ns, begin_ns + 29_000_000, step))
    return Timeline.collect(recorders, world_size=ranks)
