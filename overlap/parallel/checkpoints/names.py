"""Names in checkpoints: of a rank's tensors, and of the arrays in the state of hooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import xxhash

from ...errors import UsageError
from .pieces import Cut, Shard, Tensors, rename_tensor, weight_name


class Naming:
    """Translates the names of one rank's tensors into their names in a checkpoint, which are those of the whole model.

    Args:
        cuts: For weights of which this rank has a block only, the block's place in the whole model, by the name of the
            weight on this rank. Other weights are whole, under their own names. None: no cuts.

    Attributes:
        digest: Digest of the cuts: ranks that have different blocks have different digests. Empty without cuts.

    Raises:
        UsageError: A value of `cuts` is no `Cut`.
    """

    def __init__(self, cuts: Mapping[str, Cut] | None) -> None:
        for name, cut in (cuts or {}).items():
            if not isinstance(cut, Cut):
                raise UsageError(f"cuts: expected parallel.Cut for {name!r}, got {type(cut).__name__}")
        self._cuts = cuts
        blocks = [[name, cut.name, cut.axis, cut.index, cut.of] for name, cut in sorted((cuts or {}).items())]
        self.digest: str = "" if cuts is None else xxhash.xxh3_64_hexdigest(json.dumps(blocks).encode())

    def check_cuts(self, tensors: Tensors) -> None:
        """Refuse cuts that do not fit a model.

        Raises:
            UsageError: The model has no weight of that name, or the weight has no such axis.
        """
        for name, cut in (self._cuts or {}).items():
            if name not in tensors:
                raise UsageError(f"cuts: the model has no {name!r}; it has {', '.join(tensors)}")
            if cut.of > 1 and cut.axis >= len(tensors[name][1]):
                raise UsageError(
                    f"cuts: expected an axis of {name!r}, whose shape is {tuple(tensors[name][1])}, got {cut.axis}"
                )

    def find_cut(self, tensor: str) -> Cut:
        """Return the place of a rank's tensor in the whole model; an optimizer's state lies where its weight does."""
        found = (self._cuts or {}).get(weight_name(tensor))
        return Cut(tensor) if found is None else replace(found, name=rename_tensor(tensor, found.name))

    def rename_piece(self, piece: Shard) -> Shard:
        """Return a piece of the model under the name that it has in a checkpoint."""
        cut = self.find_cut(piece.tensor)
        return replace(piece, tensor=cut.name, cut=cut if cut.of > 1 else None)

    def whole_tensors(self, tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each whole tensor of which this rank has a block or all, by name in a checkpoint.

        Args:
            tensors: Dtype and shape of the model's tensors on this rank, by the model's names.
        """
        found = {}
        for name, (dtype, shape) in tensors.items():
            cut = self.find_cut(name)
            found[cut.name] = (dtype, cut.whole(shape))
        return found


def describe_difference(saved: Tensors, expected: Tensors) -> str:
    """Return a sentence on the first difference between a checkpoint ("it") and a model ("this one"); empty if none.

    Args:
        saved: Dtype and shape of the checkpoint's tensors, by name.
        expected: The same of the model's tensors.
    """
    for name in [*expected, *saved]:
        saved_form, model_form = saved.get(name), expected.get(name)
        if saved_form == model_form:
            continue
        if saved_form is None:
            return f"it has no {name!r}"
        if model_form is None:
            return f"it has {name!r}, which this one has not"
        return f"{name!r} is {' '.join(map(str, saved_form))} there and {' '.join(map(str, model_form))} here"
    return ""
