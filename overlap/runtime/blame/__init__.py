"""Blame: which rank waits for which, which keeps the event loop, and when the user hears of it."""
