"""Processes of a world."""
