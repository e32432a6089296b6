"""PyTorch on our ranks."""

from .backend import register

register()
