"""Training steps of language models from a configuration: what they compute and send, and how long that takes.

model = planning.load("llama-70b")
layout = planning.Layout(tp=8, pp=4, dp=32, global_batch=1024)
"""

# The map, in the order data flows:
#
#   model     Model: layers, widths, experts;  models/: published ones, as data;  configurations: read from a file
#   layout    Layout: how many ranks share what, and the batch
#   amounts   what a layer computes, reads and sends on one rank, in closed form;  memory: what a rank holds
#   program   the step as a program on ranks, issued as any other, on any clock;  weights: where those travel in it
#   parts     where the time of a simulated step went;  wires: how busy they were
#   estimates a step predicted, all of it;  trust: how far off that may be;  sensitivity: if a figure were another
#   recorded/ a recorded run as a program, for its own cluster or a larger one
#   bound     what a step takes at least;  search: the best of many layouts

from .configurations import known, load
from .estimates import Estimate, estimate
from .layout import Layout
from .memory import Memory, memory_of
from .model import Model
from .program import train

__all__ = ["Estimate", "Layout", "Memory", "Model", "estimate", "known", "load", "memory_of", "train"]
