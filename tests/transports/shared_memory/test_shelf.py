"""What ranks hold together comes back when the last of them has dropped it."""

import pytest

from transports.shared_memory.segment import Heap, Shelf, make_releaser

PAGE = 4096


def shelf_of(pages: int) -> tuple[Shelf, Heap, memoryview]:
    memory = memoryview(bytearray(PAGE * (pages + 1)))
    heap = Heap(PAGE, len(memory))
    return Shelf(memory, heap), heap, memory


def test_a_piece_comes_back_when_all_have_left() -> None:
    shelf, _, memory = shelf_of(1)
    start = shelf.loan(100, 2)
    assert start == PAGE
    leaves = [make_releaser(memory, start, 100, position) for position in range(2)]
    leaves[1]()
    assert shelf.take(PAGE) is None
    leaves[0]()
    assert shelf.take(PAGE) == start


def test_a_piece_of_one_process_comes_back_when_it_is_given_back() -> None:
    shelf, heap, _ = shelf_of(1)
    start = shelf.take(PAGE)
    assert start is not None
    assert shelf.take(PAGE) is None
    shelf.release(start)
    assert shelf.take(PAGE) == start
    assert heap.used_bytes == PAGE


def test_words_lie_behind_what_is_held() -> None:
    shelf, _, memory = shelf_of(1)
    start = shelf.loan(13, 3)
    assert start is not None
    memory[start : start + 13] = bytes(range(13))
    for position in range(3):
        make_releaser(memory, start, 13, position)()
    assert memory[start : start + 13] == bytes(range(13))


def test_what_was_left_before_says_nothing_of_what_comes_after() -> None:
    shelf, _, memory = shelf_of(1)
    for _ in range(2):
        start = shelf.loan(100, 1)
        assert start is not None
        assert shelf.loan(100, 1) is None
        make_releaser(memory, start, 100, 0)()


def test_who_needs_memory_gets_what_was_left() -> None:
    shelf, _, memory = shelf_of(1)
    start = shelf.loan(100, 1)
    assert start is not None
    assert shelf.take(PAGE) is None
    make_releaser(memory, start, 100, 0)()
    assert shelf.take(PAGE) == start


@pytest.mark.parametrize(("nbytes", "lent"), [(1, 1), (PAGE + 1, 2), (9 * PAGE, 10), (33 * PAGE, 40), (64 * PAGE, 64)])
def test_pieces_waste_at_most_a_quarter_beyond_a_page(nbytes: int, lent: int) -> None:
    heap = Heap(0, 1 << 30)
    heap.take(nbytes)
    assert heap.used_bytes == lent * PAGE
