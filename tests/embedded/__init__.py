"""Worlds of programs that own their main thread."""
