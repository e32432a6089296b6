"""What the comparison of real and virtual time says of several programs."""

import sys

from tests.benchmarks import unpaced
from tests.benchmarks.truth import mean_deviation


def test_the_mean_counts_what_is_too_long_and_too_short_alike():
    told = mean_deviation([0.01, -0.04, 0.01])
    assert told == "virtual against real, unpaced: 2.0% in the mean (aim 1.5%: MISSED), worst -4.0%"
    assert mean_deviation([0.01, -0.02]).endswith("1.5% in the mean (aim 1.5%: met), worst -2.0%")


def test_examples_are_found_and_leave_no_path_behind():
    before = list(sys.path)
    with unpaced.PROGRAMS["04_digits"]() as (program, args):
        assert (program.__name__, len(args)) == ("train", 1)
    assert sys.path == before
