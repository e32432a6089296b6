"""Drawings of a timeline: lanes of characters for the terminal, SVG pictures, and an HTML page."""
