"""A tree of arrays as bytes: what comes back is what was kept, bit by bit, or it is said to be damaged."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap import UsageError
from overlap.state.encoding import DamagedStateError, decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
arrays = st.builds(
    lambda shape, dtype: np.arange(np.prod(shape)).astype(dtype).reshape(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([np.float32, np.int8, np.bool_, np.complex128, ">f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]),
)
trees = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def kept(tree: object) -> object:
    return decode(bytearray(b"".join(encode(tree))))


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def checked(body):
    return bytearray(body + hashlib.blake2b(body, digest_size=32).digest())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (checked(b"OVSTATE1" + bytes(7)), "it is no state"),
        (checked(b"OVSTATE0" + bytes(8)), "it is no state"),
        (checked(b"OVSTATE1" + bytes(8)), "its header is no JSON"),
        (checked(b"OVSTATE1" + (2).to_bytes(8, "little") + b"{"), "its header is too long"),
        (checked(b"OVSTATE1" + (1).to_bytes(8, "little") + b"{"), "its header is no JSON"),
        (checked(b"OVSTATE1" + bytes(8))[:-1] + b"x", "its checksum is wrong"),
    ],
)
def test_what_nobody_has_encoded_is_told(data, told):
    with pytest.raises(DamagedStateError) as caught:
        decode(data)
    assert str(caught.value) == told


@given(trees)
def test_what_is_kept_comes_back(tree):
    assert same(tree, kept(tree))


def test_scalars_of_numpy_and_strided_arrays_come_back():
    tree = {"scale": np.float32(1.5), "strided": np.arange(12.0).reshape(3, 4)[:, ::2]}
    back = kept(tree)
    assert type(back["scale"]) is np.float32
    assert back["scale"] == 1.5
    np.testing.assert_array_equal(back["strided"], tree["strided"])


def test_what_comes_back_may_be_written_to():
    back = kept([np.zeros(3)])
    back[0] += 1
    assert back[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2}]}, "tree['a'][1]: cannot keep set; "),
        ({"a": np.array(["x"])}, "tree['a']: cannot keep ndarray; "),
        (object(), "tree: cannot keep object; "),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(tree, message):
    with pytest.raises(UsageError) as caught:
        kept(tree)
    advice = "expected arrays, numbers, texts or None, in lists, tuples and dicts"
    assert str(caught.value) == message + advice


def test_a_key_that_cannot_be_kept_is_named():
    with pytest.raises(UsageError) as caught:
        kept({"a": {(1, 2): 3}})
    assert str(caught.value) == "tree['a']: expected texts or integers as keys, got (1, 2)"


@given(st.data())
def test_any_change_of_a_byte_is_noticed(data):
    whole = bytearray(b"".join(encode({"a": np.arange(5), "b": 1})))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedStateError):
        decode(whole)


@given(st.integers(0, 500))
def test_any_cut_is_noticed(length):
    whole = bytearray(b"".join(encode({"a": np.arange(5), "b": 1})))
    if length < len(whole):
        with pytest.raises(DamagedStateError):
            decode(whole[:length])
