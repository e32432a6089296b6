"""Worlds on Ray, for real, and the manifests and lines of the page on engines."""
