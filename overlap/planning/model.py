"""Shape of a language model: its widths, parameters, and operations for a token. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import UsageError

_MAY_BE_ZERO = (
    "kv_heads", "head_dim", "experts", "top_k", "shared_experts", "expert_ffn", "dense_layers", "q_rank", "kv_rank",
    "rope_dim", "nope_dim", "value_dim", "window", "mtp_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer that predicts tokens. A figure of 0 is absent, or follows from the others.

    Raises:
        UsageError: If a figure is impossible; names it.
    """

    name: str  # For messages
    layers: int  # Blocks of attention and perceptron
    hidden: int  # Width of a token between them
    heads: int  # Number of attention heads
    ffn: int  # Width inside a perceptron that is no expert
    vocabulary: int  # Number of different tokens
    sequence: int  # Tokens of a sample
    kv_heads: int = 0  # Heads of keys and values; 0: the same number as `heads`
    head_dim: int = 0  # Width of a head; 0: hidden / heads
    gated: bool = True  # Whether a perceptron has three matrices (SwiGLU) instead of two
    tied: bool = False  # Whether scores use the matrix of the embedding
    experts: int = 0  # Number of experts of a layer, 0 without
    top_k: int = 0  # Experts that a token is routed to
    shared_experts: int = 0  # Further experts, to which every token goes
    expert_ffn: int = 0  # Width inside an expert; 0: `ffn`
    dense_layers: int = 0  # Number of first layers without experts
    q_rank: int = 0  # Width from which queries of latent attention are made (arXiv 2405.04434)
    kv_rank: int = 0  # Width from which keys and values are made; 0: ordinary attention
    rope_dim: int = 0  # Width of a latent head with positions
    nope_dim: int = 0  # Width of a latent head without positions
    value_dim: int = 0  # Width of the values of a latent head
    causal: bool = True  # Whether a token attends to earlier ones only
    window: int = 0  # Tokens that a token attends to at most (sliding window); 0: the sequence
    mtp_layers: int = 0  # Further layers that predict further tokens (arXiv 2412.19437, section 2.2), each with scores
    source: str = ""  # Where the figures are from

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                self._check_figure(field.name)
        if not self.head_dim and not self.kv_rank and self.hidden % self.heads:
            raise UsageError(
                f"heads: expected a divisor of hidden ({self.hidden}), or a head_dim beside it; got {self.heads}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise UsageError(f"kv_heads: expected a divisor of heads ({self.heads}), got {self.kv_heads}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UsageError(f"top_k: expected 1 to experts ({self.experts}), got {self.top_k}")
        if self.window and not self.causal:
            raise UsageError(f"window: expected a causal model, got {self.window} with causal = false")
        if self.dense_layers > self.layers:
            raise UsageError(f"dense_layers: expected at most layers ({self.layers}), got {self.dense_layers}")

    def _check_figure(self, name: str) -> None:
        """Check that the figure of this name is a whole number that is large enough."""
        value, least = getattr(self, name), 0 if name in _MAY_BE_ZERO else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}: expected a whole number from {least}, got {value!r}")

    # -- widths --------------------------------------------------------------------------------------------------

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * (self.rope_dim + self.nope_dim if self.kv_rank else self.head_dim or self._even_head_dim)

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.heads * (self.value_dim if self.kv_rank else self.head_dim or self._even_head_dim)

    @property
    def kv_width(self) -> int:
        """Width of the keys and values of a token, as they are sent to other ranks."""
        if self.kv_rank:
            return self.kv_rank + self.rope_dim
        return 2 * (self.kv_heads or self.heads) * (self.head_dim or self._even_head_dim)

    @property
    def kv_parts(self) -> int:
        """Number of parts into which keys and values can be cut: heads, or 1 with latent attention."""
        return 1 if self.kv_rank else self.kv_heads or self.heads

    @property
    def _even_head_dim(self) -> int:
        """Width of a head if the heads divide the hidden width among them."""
        return self.hidden // self.heads

    # -- parameters ----------------------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, without norms."""
        h = self.hidden
        if self.kv_rank:
            queries = self.q_rank * (h + self.query_width) if self.q_rank else h * self.query_width
            keys = h * (self.kv_rank + self.rope_dim)
            values = self.kv_rank * (self.heads * self.nope_dim + self.value_width)
            return queries + keys + values + self.value_width * h
        return h * (self.query_width + self.kv_width + self.value_width)

    @property
    def expert_width(self) -> int:
        """Width inside an expert."""
        return self.expert_ffn or self.ffn

    def perceptron(self, width: int) -> int:
        """Return the number of parameters of a perceptron with `width` units."""
        return (3 if self.gated else 2) * self.hidden * width

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts; layers count from 0."""
        return bool(self.experts) and layer >= self.dense_layers

    def layer_kinds(self, layers: range) -> list[tuple[int, int]]:
        """Return (first layer, number of layers) of each kind in a range: without experts, with experts."""
        dense = range(layers.start, min(layers.stop, max(layers.start, self.dense_layers)))
        sparse = range(dense.stop, layers.stop)
        kinds = [dense, sparse] if self.experts else [layers]
        return [(kind[0], len(kind)) for kind in kinds if kind]

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer, all experts included."""
        if not self.has_experts(layer):
            return self.attention_parameters + self.perceptron(self.ffn)
        experts = self.experts + self.shared_experts
        return self.attention_parameters + experts * self.perceptron(self.expert_width) + self.hidden * self.experts

    def active_layer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer that one token is multiplied with."""
        unused = self.experts - self.top_k if self.has_experts(layer) else 0
        return self.layer_parameters(layer) - unused * self.perceptron(self.expert_width)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, which the scores use again if it is tied."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters: layers and tables."""
        return self._table_parameters + sum(
            self.layer_parameters(layer) * number for layer, number in self.layer_kinds(self._all_layers)
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, and the tables."""
        return self._table_parameters + self._active_layer_parameters

    @property
    def _active_layer_parameters(self) -> int:
        """Parameters of all layers that one token is multiplied with."""
        return sum(self.active_layer_parameters(layer) * number for layer, number in self.layer_kinds(self._all_layers))

    @property
    def _all_layers(self) -> range:
        """All layers, with those that predict further tokens at the end."""
        return range(self.layers + self.mtp_layers)

    @property
    def _table_parameters(self) -> int:
        """Parameters of the embedding and of the matrix of the scores; one matrix if they are tied."""
        return self.embedding_parameters * (1 if self.tied else 2)

    # -- operations ----------------------------------------------------------------------------------------------

    def score_flops(self, keys: float) -> float:
        """Return the operations of one token's attention to `keys` tokens, forward."""
        return 2 * keys * (self.query_width + self.value_width)

    @property
    def attended_tokens(self) -> float:
        """Tokens that a token of a sample attends to on average: half of them if causal, fewer with a window."""
        if not self.causal:
            return float(self.sequence)
        reach = min(self.window or self.sequence, self.sequence)
        return reach - reach * reach / (2 * self.sequence)

    @property
    def sample_flops(self) -> float:
        """Operations of one sample, forward and backward, nothing computed twice, as utilisation counts them.

        Two a parameter and token forward (but for the embedding, which is looked up), twice that backward, and
        attention over the whole sequence, masked or not (arXiv 2204.02311, appendix B).
        """
        matrices = (1 + self.mtp_layers) * self.embedding_parameters + self._active_layer_parameters
        forward = 2 * matrices + (self.layers + self.mtp_layers) * self.score_flops(self.sequence)
        return 3.0 * self.sequence * forward
