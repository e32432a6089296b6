"""Measures of a timeline: how much communication was exposed, why, and which ranks and operations cost most."""
