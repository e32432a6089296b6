"""Computes that had less than a core: recorded by our own threads, and reported before anything else."""

import overlap
from overlap.config import overriding_config
from overlap.runtime import compute
from overlap.timeline import Timeline, write_trace
from overlap.timeline.files.merge import merged
from overlap.timeline.spans import STARVED
from tests.timeline.programs import data_parallel, run


def test_threads_that_run_and_have_no_processor_are_in_the_timeline(monkeypatch):
    monkeypatch.setattr(compute, "thread_time_ns", lambda: 0)  # of the time of a function, none on a processor
    monkeypatch.setattr(compute, "processor_wait_ns", lambda thread: 1 << 60)
    seen = []

    async def main(rank):
        await rank.compute(sum, [1, 2])

    with overriding_config(watcher=seen.append):
        overlap.run(main, ranks=2)
    assert seen[0].meta[STARVED] == "0:1.00 1:1.00"


def test_a_trace_says_first_that_computes_had_less_than_a_core(tmp_path):
    timeline = run(data_parallel(awaits="each"))
    timeline.meta[STARVED] = "0:0.25 1:0.50"
    write_trace(timeline, tmp_path / "t.json")
    found = overlap.why(tmp_path / "t.json")
    assert found.verdict.startswith(
        "computes of ranks 0-1 had less than a core: for up to 50% of their time they could run and had no processor: "
        "first run fewer ranks, threads or other programs on this machine; step"
    )
    assert found.advice[0].evidence.startswith("computes of ranks 0-1 had less than a core")


def test_parts_of_a_run_keep_their_shares():
    parts = [Timeline(spans=[], world_size=2, meta={STARVED: f"{rank}:0.50"}) for rank in (0, 1)]
    assert merged(parts).meta[STARVED] == "0:0.50 1:0.50"
