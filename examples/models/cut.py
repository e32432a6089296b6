"""A layer that is cut over the ranks of a tensor group: each has some of its heads or units."""

from collections.abc import Mapping

import overlap
from overlap.parallel import Layer, Local

from .gpt import GPT


class Cut:
    """Adds up the results of the parts of a layer: outputs forward, gradients of the input backward.

    Args:
        rank: This rank.
        group: The ranks that have the parts.
        layer: With a `share` of one over their number; see `gpt.Attention`.
    """

    def __init__(self, rank: overlap.Rank, group: overlap.Group, layer: object) -> None:
        self.rank, self.group, self.layer = rank, group, layer

    def forward(self, w: object, x: object) -> tuple[object, object]:
        """Issue the pass, and the sum."""
        out = self.rank.compute(self.layer.forward, w, x)
        return self.group.all_reduce(out[0]), out[1]

    def backward(self, w: Mapping[str, object], saved: object, dy: object) -> tuple[object, dict[str, object]]:
        """Issue the pass, and the sums. Each rank has the gradients of the norm, which is whole, from its own part."""
        back = self.rank.compute(self.layer.backward, w, saved, dy)
        dx = self.group.all_reduce(back[0])
        return dx, {key: self.group.all_reduce(back[1][key]) if key == "norm" else back[1][key] for key in w}


def layers_of(gpt: GPT, rank: overlap.Rank, group: overlap.Group) -> dict[str, Layer]:
    """Return the layers of a model by name, cut over a group wherever there are heads or units."""
    return {
        name: Cut(rank, group, layer) if name in gpt.inner else Local(rank, layer.forward, layer.backward)
        for name, layer in gpt.layers.items()
    }
