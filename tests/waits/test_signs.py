"""The process that ended a job, from signs of different strength."""

import pytest

from overlap.waits.signs import Evidence, Sign, culprit


def sign(process: int, evidence: Evidence, at: int = 0) -> Sign:
    return Sign(process=process, evidence=evidence, at_ns=at)


@pytest.mark.everyday(6)
@pytest.mark.parametrize(
    ("signs", "process"),
    [
        ([], None),
        ([sign(0, Evidence.REPORTED, 1), sign(1, Evidence.OWN_ERROR, 2)], 1),
        ([sign(0, Evidence.EXIT, 1), sign(1, Evidence.OWN_ERROR, 2)], 1),
        ([sign(0, Evidence.WIRE_BROKEN, 1), sign(1, Evidence.LINK_ENDED, 2), sign(2, Evidence.SILENT)], 1),
        ([sign(0, Evidence.OWN_ERROR, 2), sign(1, Evidence.OWN_ERROR, 1)], 1),
        ([sign(0, Evidence.STOPPED_BY_LAUNCHER, 1), sign(1, Evidence.REPORTED, 2)], 1),
    ],
)
def test_the_strongest_evidence_counts_and_then_the_clock(signs: list[Sign], process: int | None) -> None:
    found = culprit(signs)
    assert (found and found.process) == process


def test_only_weak_evidence_waits_for_stronger() -> None:
    patient = [evidence for evidence in Evidence if evidence.patience_s]
    assert patient == [Evidence.WIRE_BROKEN, Evidence.REPORTED]
