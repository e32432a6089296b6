"""The engine: how operations that have met become moved bytes."""
