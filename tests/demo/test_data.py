import hashlib
from importlib.resources import files

import numpy as np
import pytest

from overlap.data import Digits, digits

CHECKSUM = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
PER_DIGIT = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as the UCI repository states for its test set
SPLIT = [3, 3, 8, 8, 7, 2, 2, 4, 4, 2, 7, 9, 3, 6, 2, 1, 7, 1, 8, 0]
PER_DIGIT_TESTED = [31, 37, 39, 41, 27, 35, 37, 38, 37, 37]

FIRST = """\
..5d91..
..dfaf5.
.3f2.b8.
.4c..88.
.58..98.
.4b.1c7.
.2e5ac..
..6da..."""


def test_the_file_is_the_one_described():
    data = files("overlap.data").joinpath("digits.csv.gz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == CHECKSUM
    assert CHECKSUM in files("overlap.data").joinpath("digits.md").read_text(encoding="utf-8")


def test_shapes_types_and_range():
    data = digits()
    assert (data.images.shape, data.images.dtype) == ((1797, 64), np.float32)
    assert (data.labels.shape, data.labels.dtype) == ((1797,), np.int64)
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert len(data) == 1797
    assert np.bincount(data.labels).tolist() == PER_DIGIT


def test_the_first_image_is_a_zero():
    data = digits()
    ink = (data.images[0] * 16).astype(int).reshape(8, 8)
    assert "\n".join("".join(".123456789abcdefg"[dots] for dots in row) for row in ink) == FIRST
    assert data.labels[0] == 0


def test_the_split_is_always_the_same():
    train, test = digits().split()
    assert (len(train), len(test)) == (1438, 359)
    assert test.labels[:20].tolist() == SPLIT
    assert np.bincount(test.labels).tolist() == PER_DIGIT_TESTED


def test_the_split_uses_every_image_once():
    data = digits()
    numbered = Digits(images=data.images, labels=np.arange(len(data)))
    train, test = numbered.split()
    assert sorted([*train.labels, *test.labels]) == list(range(1797))
    assert (test.images == data.images[test.labels]).all()


def test_the_data_cannot_be_changed():
    for part in (digits(), *digits().split()):
        with pytest.raises(ValueError, match="read-only"):
            part.images[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            part.labels[0] = 1
