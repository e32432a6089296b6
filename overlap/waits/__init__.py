"""Who waits for whom: one record of an operation's end, one judge, one wording; and who ended the job. Pure.

Readers turn their sources into `RankView`s: live ranks (`runtime.blame`), flight records and dumps of PyTorch
(`flight`), records of tests (`testing`).
"""

# The map of this room:
#
#   ends       the ends of operations, and the view of a rank
#   judge      the verdict: which ranks the others wait for, and whether they wait in vain
#   signs      which process ended the job, by the evidence on each
#   wording    the sentence of a verdict, and the table of ranks: the only place with English about waits
