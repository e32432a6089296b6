"""A timeline as a picture: `scene` lays out rectangles and texts; `svg` and `png` write them."""

from .png import png
from .scene import Scene, scene_of
from .svg import svg

__all__ = ["Scene", "png", "scene_of", "svg"]
