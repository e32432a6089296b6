"""The runtime: ranks, streams, futures, matching, and the engine that executes matched operations."""
