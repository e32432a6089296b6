"""The benchmark's helper runs, and what it costs is what a small ring costs."""

from overlap.collectives.cost.speed import ring_costing_s


def test_ring_costing():
    without, loaded = ring_costing_s(64)
    assert without > 0
    assert loaded > 0
