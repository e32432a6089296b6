"""Training strategies with one interface, built on nothing but ranks, streams and futures.

model = parallel.DataParallel(rank, params, optimizer=parallel.Adam(1e-3))
... model[name] ...            # the newest weight, or a future of it
model.reduce(name, grad)       # travels while the layers below compute
model.step()                   # issues the update; nothing waits
await model.finish()
"""

# The map, in the order data flows:
#
#   tree           parameters by name, and trees of which any part may be a future
#   returned       checks of what functions of the program return
#   memory_work    the computes of the library itself, and the line of the program that they belong to
#   awaitable_weights  weights that `await` returns as arrays
#   parameters     where weights and the optimizer's state live, flat, and what a model takes of memory
#   optimizers     what changes weights, on flat arrays
#   settings       the arguments that strategies share;  strategy: their base, from hand-over to the limit of steps
#   buckets/       gradients that travel together: divided, packed, reduced, applied
#   hooks/         the mean of a bucket with fewer bytes on the wire
#   data_parallel  DataParallel: every rank has all weights
#   sharded        Sharded: ZeRO
#   layers         Layer, Local, Sequential, Replicated: what issues forward and backward
#   tensor         ColumnLinear, RowLinear: matrices cut over a group;  VocabularyLoss: scores cut by words
#   schedules/     pipeline schedules as data;  pipeline: Pipeline, which runs one;  passing: from stage to stage
#   models         Models: several models as one
#   checkpoints/   Checkpoints: saved beside training, resumed on any number of ranks

from .buckets.plan import BucketPlan, GradientBucket, Hook, plan_buckets
from .checkpoints.checkpoints import Checkpointed, Checkpoints, Restored
from .checkpoints.pieces import Cut
from .data_parallel import DataParallel
from .layers import Layer, Local, Replicated, Sequential
from .models import Models
from .optimizers import SGD, Adam, AdamW, Nesterov, Optimizer
from .parameters import ModelMemory, Stage, expected_memory
from .pipeline import Passed, Pipeline
from .sharded import Sharded
from .strategy import Ahead, Strategy
from .tensor import ColumnLinear, RowLinear, VocabularyLoss
from .tree import flatten, rebuild

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Ahead",
    "BucketPlan",
    "Checkpointed",
    "Checkpoints",
    "ColumnLinear",
    "Cut",
    "DataParallel",
    "GradientBucket",
    "Hook",
    "Layer",
    "Local",
    "ModelMemory",
    "Models",
    "Nesterov",
    "Optimizer",
    "Passed",
    "Pipeline",
    "Replicated",
    "Restored",
    "RowLinear",
    "Sequential",
    "Sharded",
    "Stage",
    "Strategy",
    "VocabularyLoss",
    "expected_memory",
    "flatten",
    "plan_buckets",
    "rebuild",
]
