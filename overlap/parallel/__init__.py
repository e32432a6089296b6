"""Training strategies with one interface, built on nothing but ranks, streams and futures.

model = parallel.DataParallel(rank, params, optimizer=parallel.Adam(1e-3))
... model[name] ...            # the newest weight, or a future of it
model.reduce(name, grad)       # travels while the layers below compute
model.step()                   # issues the update; nothing waits
await model.finish()
"""

# The map, in the order data flows:
#
#   tree           parameters by name;  names: what model[name] may name;  parameters: where they live, flat
#   optimizers     what changes them, on flat arrays
#   buckets        which gradients travel together;  reduction: one bucket at work;  memory_work: its computes
#   finite, norms  what is asked of gradients;  agreement: what must be the same on all ranks
#                  hooked: what a hook has around it;  replicas: whether ranks still have the same weights
#   bucketed       what the next two have in common: gradients come by name, and leave in buckets;
#                  settings: what they may be asked for;  ahead: how far a program may be ahead
#   data_parallel  DataParallel: every rank has all weights;  tuning: buckets chosen by replaying recorded steps
#   sharded        Sharded: ZeRO;  shards: what a rank keeps of a bucket;  shared_bucket: its operations
#                  gathering: when whole parameters are there;  model_memory: what it all takes
#   schedules/     pipeline schedules as data
#   layers         what issues: Local functions;  sequential: a chain of layers, in parts that hide each other
#   tensor         ColumnLinear, RowLinear: matrices cut over a group;  vocabulary: the loss of scores cut by words
#   experts        Experts: a mixture of experts, by all-to-all;  routing: who goes where;  own_experts: those of a rank
#   stages         Pipeline: runs a schedule;  stages_pass: one batch on its way through a rank's stages
#   models         Models: several as one, as experts are averaged over other ranks than the rest
#   local_steps    LocalSGD, DiLoCo: ranks train apart for a while;  outer_steps: what brings them together
#   checkpoints    Checkpoints: saved beside training, resumed on any number of ranks;  checkpoint_files: on the disk
#                  pieces: what a model is made of, however it is cut;  own_state: what a rank has for itself
#                  cuts: which block of a weight a rank has;  layouts: what its tensors are called in a checkpoint
#   hooks/         how the mean of a bucket gets around with fewer bytes
#   pending        trees of which any part may be a future

from .buckets import BucketPlan, GradientBucket, Hook, plan_buckets
from .checkpoints import Checkpointed, Checkpoints, Restored
from .cuts import Cut
from .data_parallel import DataParallel
from .experts import Experts
from .layers import Layer, Local
from .local_steps import DiLoCo, LocalSGD, LocalSteps
from .model_memory import ModelMemory, expected_memory
from .models import Models
from .optimizers import SGD, Adam, AdamW, Optimizer
from .outer_steps import Nesterov
from .sequential import Replicated, Sequential
from .sharded import Sharded
from .shards import Stage
from .stages import Passed, Pipeline
from .tensor import ColumnLinear, RowLinear
from .tree import flatten, rebuild
from .vocabulary import VocabularyLoss

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "BucketPlan",
    "Checkpointed",
    "Checkpoints",
    "ColumnLinear",
    "Cut",
    "DataParallel",
    "DiLoCo",
    "Experts",
    "GradientBucket",
    "Hook",
    "Layer",
    "Local",
    "LocalSGD",
    "LocalSteps",
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
    "VocabularyLoss",
    "expected_memory",
    "flatten",
    "plan_buckets",
    "rebuild",
]
