import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.ranklist import listed, unlisted


@given(st.lists(st.integers(0, 30), min_size=1))
def test_lists_read_back_in_their_order(ranks):
    assert unlisted(listed(ranks)) == tuple(ranks)


def test_runs_are_shortened():
    assert listed([0, 1, 2, 5, 7, 8, 3]) == "0-2, 5, 7-8, 3"
    assert listed([]) == ""


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "2-", "3-1", "1 2", "\u0663", "1-2-3"])
def test_what_is_not_a_list_is_named(text):
    with pytest.raises(ValueError, match="is not a rank or a range such as 3-5"):
        unlisted(text)


@pytest.mark.parametrize("text", ["0-999999999", "5, 0-999999", "0-500000, 0-500000"])
def test_a_slip_does_not_fill_the_memory(text):
    with pytest.raises(ValueError, match="makes more than 1000000 ranks"):
        unlisted(text)
