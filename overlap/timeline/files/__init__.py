"""Trace files: writing and reading a timeline as a Chrome trace, and reading the traces of other tools."""
