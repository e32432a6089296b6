"""`overlap calibrate --here` beside other programs: how busy they are, and the wider band."""

import pytest

from overlap.cli.calibrate import busy, here
from overlap.cli.calibrate.busy import Busyness
from overlap.cost.fitting import FittedRow, Sample
from overlap.cost.own import OwnFit


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """The system's counters, which go on by some ticks of work and of rest while the program rests."""
    path = tmp_path / "stat"

    def of(*looks):
        ticks = [0, 0]
        lines = []
        for work, rest in looks:
            lines.append(f"cpu {ticks[0]} 0 0 {ticks[1]} 0 0 0 0 0 0\ncpu0 1 1\n")
            ticks = [ticks[0] + work, ticks[1] + rest]
            lines.append(f"cpu {ticks[0]} 0 0 {ticks[1]} 0 0 0 0 0 0\ncpu0 1 1\n")
        path.write_text(lines.pop(0))
        monkeypatch.setattr(busy.time, "sleep", lambda _: path.write_text(lines.pop(0)))
        found = Busyness(4, stat=path)
        for _ in looks:
            found.look()
            if lines:
                path.write_text(lines.pop(0))
        return found

    return of


def fit(*errors):
    sample = Sample(collective="all_reduce", nbytes=8, ranks=(0, 1), time_s=1.0)
    return OwnFit(
        inside={}, between={}, rows=tuple(FittedRow(sample=sample, predicted_s=1 + e, left_out=True) for e in errors)
    )


def test_others_keep_processors_busy(counters):
    found = counters((30, 10), (10, 30))
    assert found.cores == pytest.approx(2.0)
    assert found.factor == pytest.approx(2.0)


def test_the_band_is_as_wide_as_the_times_may_be_too_long(counters):
    told = "\n".join(here.busy_lines(fit(0.1, 0.2, 0.3), counters((20, 20))))
    assert told == (
        "BUSY: other programs used 2.0 processors meanwhile, so that times may be 2.0\n"
        "  times too long: on a quiet computer expect predictions to be off by 140% in\n"
        "  the median and 160% at worst; measure again while nothing else runs"
    )


def test_a_quiet_computer_needs_no_words(counters):
    assert here.busy_lines(fit(0.1), counters((0, 40), (1, 39))) == []


def test_a_system_that_does_not_tell_is_taken_to_be_quiet(tmp_path):
    found = Busyness(2, stat=tmp_path / "none")
    found.look()
    assert (found.cores, found.factor) == (0.0, 1.0)
