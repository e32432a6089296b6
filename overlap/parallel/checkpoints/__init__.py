"""Checkpoints of models: saved beside training, and resumed on any number of ranks."""
