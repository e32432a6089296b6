"""Distributed programs as tests: many ranks in one process, in virtual time, in an order that a seed decides.

In a test of pytest::

    @pytest.mark.ranks(64, cluster="trn2.48xlarge x4")
    async def test_loop(rank): ...

    def test_ddp(ranks):
        run = ranks.program("train.py", ranks=8, args=["--steps", "5"])
        assert run.same("model weights") and run.exposed < 0.05
"""

# The map of this folder:
#
#   pytest_overlap  (next to the packages) the plugin of pytest, which loads this folder when a test uses it
#   ranks        Ranks: the fixture; run_marked: the marker
#   run          Run: the result of many ranks, and the questions of a test
#   running      a setting becomes a run; seeds are tried, and a failing one is made smaller
#   judging      from the error of a run to verdicts, by the judge of waits;  latent: faults that did no harm this time
#   record       every operation of every rank, as data
#   faults       faults as data, drawn or written down;  world: the simulated world that records, with these faults
#   turns        the order of ranks by priorities that change
#   threads      a rank whose program is plain code: its thread, and the baton
#   views        the process as each rank sees it
#   hashing      sets whose order differs between ranks, as between processes
#   programs     programs and functions that use torch.distributed;  guards: their effects on the process
#   pytorch      puts torch.distributed into threads;  torch_rank: that of one rank;  torch_store: where ranks meet;
#                torch_threads: threads that save checkpoints;  torch_profiler: the rank that has the profiler
#   checkpoints  whether a checkpoint can be restored
#   watch        functions of PyTorch in a rank: times, buffers in flight, memory, weights

from .faults import Fault
from .ranks import Ranks, run_marked
from .record import Issue, Record, Verdict
from .run import Answer, RanksFailed, Run

__all__ = ["Answer", "Fault", "Issue", "Ranks", "RanksFailed", "Record", "Run", "Verdict", "run_marked"]
