"""A stack of perceptrons without data, for the virtual clock: only shapes, and the costs of products."""

import overlap
from overlap.parallel import ColumnLinear, Layer, Pipeline, RowLinear, Sequential, schedules

BLOCKS, HIDDEN = 4, 4096  # a block has two matrices, of 4 HIDDEN^2 weights each
Shapes = dict[str, dict[str, object]]


def build_layers(
    rank: overlap.Rank, group: overlap.Group, tokens: int, blocks: range
) -> tuple[dict[str, Layer], Shapes]:
    """Return layers, and weights without data, of some blocks; a group has a part of each.

    Args:
        rank: This rank.
        group: The ranks that share each matrix.
        tokens: That go through at once.
        blocks: Which.
    """
    layers: dict[str, Layer] = {}
    weights: Shapes = {}
    units = 4 * HIDDEN // group.size
    for block in blocks:
        layers[f"up{block}"] = ColumnLinear(rank, group, HIDDEN, 4 * HIDDEN, tokens=tokens)
        layers[f"down{block}"] = RowLinear(rank, group, 4 * HIDDEN, HIDDEN, tokens=tokens)
        weights[f"up{block}"] = {"weight": rank.empty((HIDDEN, units))}
        weights[f"down{block}"] = {"weight": rank.empty((units, HIDDEN))}
    return layers, weights


def issue_step(rank: overlap.Rank, model: object, layers: dict[str, Layer], tokens: int, parts: int) -> None:
    """Issue a step of a batch that goes through in parts, one of which computes while another is added up."""
    xs, kept = [rank.empty((tokens, HIDDEN))] * parts, {}
    for name, layer in layers.items():
        xs, kept[name] = zip(*[layer.forward(model[name], x) for x in xs], strict=True)
    for name, layer in reversed(layers.items()):
        backs = [layer.backward(model[name], *each) for each in zip(kept[name], xs, strict=True)]
        xs, gradients = zip(*backs, strict=True)
        model.reduce(name, rank.compute(lambda first, *_: first, *gradients, name="add", seconds=0.0))
    model.step()


def make_pipeline(
    rank: overlap.Rank,
    model: object,
    layers: dict[str, Layer],
    weights: Shapes,
    tokens: int,
    group: overlap.Group,
    microbatches: int,
) -> Pipeline:
    """Return a pipeline, by 1F1B, whose stage on this rank has these layers."""
    return Pipeline(
        rank,
        schedules.make("1f1b", ranks=group.size, microbatches=microbatches),
        {group.rank: Sequential(rank, layers)},
        {group.rank: weights},
        loss=lambda y, _: (y, 0.0),
        loss_cost={"seconds": 0.0},
        boundary=((tokens, HIDDEN), "float32"),
        group=group,
        model=model,
    )
