"""Small real data that ships with the package: the handwritten digits that the demo and the examples learn."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

__all__ = ["Digits", "digits"]

_INK = 16  # value of a pixel that is all ink: four by four dots of the original scan

# Neighbours in the file are by the same writer and often count upwards, so the parts are drawn at random. The legacy
# generator is the one whose stream numpy promises never to change.
_SPLIT_SEED = 1998


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images of n handwritten digits, and their labels."""

    images: NDArray[np.float32]  # float32, shape (n, 64): 8x8 pixels, row by row, from 0 (paper) to 1 (ink). Read-only.
    labels: NDArray[np.int64]  # int64, shape (n,): the digits, 0 to 9. Read-only.

    def __len__(self) -> int:
        return len(self.labels)

    def split(self) -> tuple[Digits, Digits]:
        """Return the training part and the test part (a fifth of all images); always the same ones for `digits()`."""
        order = np.random.RandomState(_SPLIT_SEED).permutation(len(self))
        tests = len(self) // 5
        return self._take_images(order[tests:]), self._take_images(order[:tests])

    def _take_images(self, chosen: NDArray[np.int64]) -> Digits:
        return _make_read_only_digits(self.images[chosen], self.labels[chosen])


def digits() -> Digits:
    """Read the 1797 images that come with the package (see `digits.md` beside this file). Cost: about 10 ms.

    Source: E. Alpaydin, C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    CC BY 4.0.
    """
    with files(__name__).joinpath("digits.csv.gz").open("rb") as packed, gzip.open(packed, "rt") as rows:
        table = np.loadtxt(rows, delimiter=",", dtype=np.int64)
    return _make_read_only_digits(table[:, :-1].astype(np.float32) / np.float32(_INK), table[:, -1].copy())


def _make_read_only_digits(images: NDArray[np.float32], labels: NDArray[np.int64]) -> Digits:
    images.setflags(write=False)
    labels.setflags(write=False)
    return Digits(images=images, labels=labels)
