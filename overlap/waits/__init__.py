"""Waits of ranks: one record of the end of an operation, one judge, one wording; and the end of a job. Pure.

Readers turn their sources into `RankView`s: live ranks (`runtime.blame`), flight records and dumps of PyTorch
(`flight`), records of tests (`testing`).
"""

# The map of this room:
#
#   ends       the ends of operations, and the view of a rank
#   judge      the verdict: which ranks the others wait for, and whether they wait in vain
#   signs      which process ended the job, by the evidence on each
#   wording    the sentence of a verdict, and the table of ranks: the only place with English about waits
