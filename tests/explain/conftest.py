"""Fixtures of timelines, which the sentence is on."""

from tests.timeline.conftest import training as training
