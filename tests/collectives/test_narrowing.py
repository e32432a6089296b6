"""Collectives for one rank, out of tables for all."""

import pytest

from overlap.collectives.generators import generate
from overlap.collectives.narrowing import WIDER, narrow_to_root
from overlap.collectives.proof import verify

TABLES = [
    ("gather", "ring"), ("gather", "mesh"), ("gather", "bruck"), ("gather", "rdh"), ("gather", "hierarchical"),
    ("reduce", "ring"), ("reduce", "mesh"), ("reduce", "rdh"), ("reduce", "recursive_doubling"),
    ("reduce", "one_shot"), ("reduce", "hierarchical"),
]  # fmt: skip


@pytest.mark.parametrize(("collective", "algorithm"), TABLES)
@pytest.mark.parametrize("root", [0, 3])
def test_the_root_has_its_result_and_nothing_else_travels(collective, algorithm, root):
    wider = generate(WIDER[collective], algorithm, 8)
    table = narrow_to_root(wider, root)
    verify(table)
    assert (table.collective, table.root) == (collective, root)
    remote, before = (int((each.src != each.dst).sum()) for each in (table, wider))
    assert remote < before
    assert {int(rank) for rank in table.dst[table.dbuf == 1]} == {root}
