"""Buckets of gradients: how they are divided, packed, reduced and applied."""
