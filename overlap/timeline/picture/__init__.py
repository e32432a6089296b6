"""A timeline as a picture: `scene` lays out rectangles and texts; `as_svg` and `as_png` write them."""

from .as_png import check_pillow, png
from .as_svg import svg
from .scene import Scene, scene_of

__all__ = ["Scene", "check_pillow", "png", "scene_of", "svg"]
