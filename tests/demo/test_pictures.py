"""What every demo draws has to fit on a small terminal, also where there is much to say."""

from types import SimpleNamespace

from overlap.cli.demo.pictures import verdict
from overlap.timeline.measure.reasons import Cause
from overlap.timeline.measure.verdict import Verdict

MS = 10**6
HERE = "/home/somebody/.venv/lib/python3.11/site-packages/overlap/cli/demo/training.py"


def cause(rank, doing, name, ms):
    return Cause(victim=0, rank=rank, doing=doing, name=name, call_site=f"{HERE}:145", duration_ns=ms * MS)


def judged(*causes):
    waiting = sum(cause.duration_ns for cause in causes if cause.rank is not None)
    wire = sum(cause.duration_ns for cause in causes if cause.rank is None)
    return Verdict(
        step=12,
        ranks=1,
        wall_ns=1047 * MS,
        walls_ns=1047 * MS,
        compute_ns=846 * MS,
        exposed_ns=waiting + wire,
        waiting_ns=waiting,
        wire_ns=wire,
        transfer_ns=800 * MS,
        hideable_ns=800 * MS,
        idle_ns=62 * MS,
        causes=causes,
    )


def test_of_many_who_were_waited_for_one_is_named_and_no_folder():
    waits = [cause(rank, "program", "bucket 10", ms) for rank, ms in ((5, 51), (6, 50), (7, 49))]
    wires = [cause(None, "wire", f"bucket {index}", 50) for index in (10, 11)]
    told = verdict(SimpleNamespace(verdict=judged(*waits, *wires)), width=80)
    assert told == (
        "with overlap, step 1047 ms: compute 846.0, exposed 250.0 (24%): 51.0 waiting for\n"
        "rank 5 (its program, before bucket 10 at training.py:145), 99.0 for 2 others,\n"
        "100.0 on the wire (mostly bucket 10 at training.py:145); idle 62.0; hidden 88%\n"
        "of 100% possible"
    )
