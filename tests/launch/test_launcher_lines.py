import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.launch.output import LONGEST_BYTES, LineBuffer, line_prefix


def cut(*pieces, times=None):
    lines = LineBuffer()
    found = [line for piece, now_s in zip(pieces, times or [0.0] * len(pieces), strict=True)
             for line in lines.feed(piece, now_s=now_s)]  # fmt: skip
    return found, lines.end()


@pytest.mark.parametrize(
    ("pieces", "lines", "left"),
    [
        ((b"a\nb\n",), [b"a\n", b"b\n"], []),
        ((b"a", b"b\n", b"c"), [b"ab\n"], [b"c\n"]),
        ((b"a\r\nb\r", b"\nc\r\r\n"), [b"a\n", b"b\n", b"c\n"], []),
        ((b"\n\n",), [b"\n", b"\n"], []),
        ((b"\xff\x00\n\xfe",), [b"\xff\x00\n"], [b"\xfe\n"]),
        ((), [], []),
    ],
)
def test_lines_are_whole(pieces, lines, left):
    assert cut(*pieces) == (lines, left)


def test_of_a_progress_bar_a_state_a_second_is_shown_and_the_last():
    pieces = [b"\r%d %%" % number for number in range(6)]
    assert cut(*pieces, times=[0.0, 0.2, 0.4, 1.3, 1.5, 2.0]) == ([b"0 %\n", b"2 %\n"], [b"5 %\n"])
    assert cut(*pieces, b"\rdone\n") == ([b"0 %\n", b"done\n"], [])


def test_the_last_state_is_shown_even_if_it_came_too_early():
    assert cut(b"1 %\r2 %\r", b"") == ([b"1 %\n"], [b"2 %\n"])
    assert cut(b"1 %\r2 %\r3 %\r\r") == ([b"1 %\n"], [b"3 %\n"])


def test_a_line_without_end_is_let_go_in_pieces():
    found, left = cut(*[b"x" * 1000] * 200)
    assert [len(line) for line in [*found, *left]] == [LONGEST_BYTES + 1] * 3 + [200_000 - 3 * LONGEST_BYTES + 1]


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b""))), st.data())
def test_pieces_of_any_size_give_the_same_lines(lines, data):
    text = b"\n".join(lines)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    found, left = cut(*pieces)
    assert b"".join(found + left) == (text if text.endswith(b"\n") or not text else text + b"\n")


def test_prefixes():
    assert line_prefix(3, colour=False) == b"[process 3] "
    assert line_prefix(0, colour=True) == b"\x1b[36m[process 0]\x1b[0m "
    assert line_prefix(0, colour=True) != line_prefix(1, colour=True)
