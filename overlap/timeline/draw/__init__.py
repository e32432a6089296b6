"""Drawings of a timeline: lanes of characters for the terminal, SVG and PNG pictures, and an HTML page."""
