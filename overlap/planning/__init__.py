"""Training steps of language models from a configuration: their computes, their communication and their time.

model = planning.load("llama-70b")
layout = planning.Layout(tp=8, pp=4, dp=32, global_batch=1024)
"""

# The map, in the order data flows:
#
#   model      Model: layers, widths, experts;  models/: published ones, as data;  configurations: read from a file
#   layout     Layout: degrees of parallelism, and the batch
#   device     measured rates of computes: matrix products by shape, attention, memory
#   amounts    operations, bytes and time of one rank's computes, in closed form;  memory: what it holds
#   program    the step as a program on ranks, on any clock;  weights: the transfers of weights and gradients in it
#   folded     that program with the inside of its layers in one compute;  simulating: both in virtual time
#   parts      the parts of a simulated step's time
#   estimates  a predicted step
#   validation published steps (published/) beside predictions;  trust: the error of predictions
#   bound      a lower bound of a step;  search: the best of many layouts
#   recorded/  a recorded run as a program, for its own cluster or a larger one
#   calibrate  a machine file from benchmark_logs, or from measurements of this computer;  products: from timed products
#
# The runtime does not know this room: only the command does.

from .configurations import known, load
from .estimates import Estimate, estimate
from .layout import Layout
from .memory import Memory, memory_of
from .model import Model
from .program import train

__all__ = ["Estimate", "Layout", "Memory", "Model", "estimate", "known", "load", "memory_of", "train"]
