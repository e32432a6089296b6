"""The runtime: ranks, streams, futures, matching, and the engine that moves what has met."""
