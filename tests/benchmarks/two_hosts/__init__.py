"""A training step between two emulated hosts, and two links against one."""

# In the order in which to read it:
#
#   network      two network namespaces, and wires of a stated speed between them
#   perceptron   what is trained
#   training     one rank of ours: the step, and what it is made of
#   ddp          one rank of PyTorch's DistributedDataParallel
#   standing_still  one rank of ours, of which the second seldom looks
#   raw          one process that exchanges bytes over a bare socket
#   programs     runs one program in both namespaces
#   simulated    the same step on the virtual clock
#   contest      all figures, and their aims
#   planned      whether plans name the fastest algorithm, by what `hosts.toml` says of the wire

from . import planned
from .contest import figures

__all__ = ["figures", "planned"]
