"""A transformer as figures: the sizes of its layers, and the work of their computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Equal layers of attention and a four times wider perceptron; embeddings are left out.

    Attributes:
        layers: How many.
        hidden: Width.
        seq: Tokens of a sample.
    """

    layers: int
    hidden: int
    seq: int

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer: four matrices of attention, and two that are four times as large."""
        return 12 * self.hidden**2

    @property
    def parameters(self) -> int:
        """Weights of all layers."""
        return self.layers * self.layer_parameters

    def forward_flops(self, batch: int) -> float:
        """Operations of a layer's forward pass: 2 per weight and token, and the products of attention.

        Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
        arXiv:2104.04473, appendix. A backward pass has twice as many.
        """
        return batch * (24.0 * self.seq * self.hidden**2 + 4.0 * self.seq**2 * self.hidden)
