import pytest

from overlap.timeline import Recorder, Timeline

START_NS = 5_000_000_000


def record_step(recorder, step, world, *, late_ns=0, world_last_ns=0):
    """Forward 3 ms, then four layers of backward, each followed by an all-reduce that overlaps with the next one."""
    begin = START_NS + step * 12_000_000
    recorder.append(("compute", "compute", "forward", begin, begin + 3_000_000 + late_ns, None))
    for layer in range(4):
        back = begin + 3_000_000 + late_ns + layer * 1_000_000
        recorder.append(("compute", "compute", f"backward {layer}", back, back + 900_000, None))
        active, met = back + 950_000, back - late_ns + world_last_ns + 950_000
        end = begin + 5_950_000 + world_last_ns + layer * 1_400_000
        info = (
            ("all_reduce", "ring", world, step * 4 + layer, 4096, "float32", met),
            back + 900_000,
            0,
            "train.py:41",
            0,
            step,
        )
        recorder.append(("comm", "comm", f"all_reduce {layer}", active, end, info))
    recorder.append(("step", "step", f"step {step}", begin, begin + 11_500_000 + step * 100_000, step))


@pytest.fixture
def training():
    """Return a function that makes the timeline of n ranks, three steps, the last rank late by `late_ns`."""

    def make(ranks, *, late_ns=1_000_000, clock="real"):
        recorders = [Recorder(rank) for rank in range(ranks)]
        for recorder in recorders:
            own_ns = late_ns if recorder.rank == ranks - 1 else 0
            for step in range(3):
                record_step(recorder, step, ("world", tuple(range(ranks))), late_ns=own_ns, world_last_ns=late_ns)
        return Timeline.collect(recorders, world_size=ranks, clock=clock, meta={"script": "train.py", "host": "a"})

    return make
