"""How much hides behind compute, in virtual time: of a model of 32 layers on 64 ranks of a trn2."""

import pytest

from .deep import MB, NAMES, spans_of, steady


@pytest.mark.everyday(1)
@pytest.mark.parametrize("waits", [False, True], ids=["ahead", "bounded"])
@pytest.mark.parametrize(("seconds", "nbytes"), [(0.010, 400 * MB), (0.0005, 32 * MB)])
def test_where_computing_takes_longer_communication_is_hidden(waits, seconds, nbytes):
    row = steady(spans_of(seconds, nbytes, waits))
    assert row.compute_ns > row.comm_ns
    assert row.compute_ns >= 0.98 * row.wall_ns
    assert row.idle_ns == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "nbytes"), [(0.00001, 32 * MB), pytest.param(0.0001, 400 * MB, marks=pytest.mark.slow)]
)
def test_weights_that_forward_needs_first_overtake(seconds, nbytes):
    """Where the wire is the limit, forward begins with the first weights instead of waiting for all."""
    spans = spans_of(seconds, nbytes)
    assert steady(spans).comm_ns > steady(spans).compute_ns
    assert steady(spans).comm_ns >= 0.98 * steady(spans).wall_ns
    assert not waits_for_last_bucket(spans)


def waits_for_last_bucket(spans):
    """Whether the second step's forward begins only when all gradients of the first step have been reduced."""
    begins_ns = min(span.start_ns for span in spans if span.name == f"forward {NAMES[0]}" and span.step == 1)
    ends_ns = max(span.end_ns for span in spans if span.name.startswith("bucket") and span.step == 0)
    return begins_ns >= ends_ns


def test_a_gradient_travels_while_the_layers_below_compute():
    spans = spans_of(0.010, 400 * MB)
    first = next(span for span in spans if span.name == "bucket 0" and span.step == 2)
    deepest, next_one = (
        next(span for span in spans if span.name == f"backward {NAMES[i]}" and span.step == 2) for i in (-1, -2)
    )
    assert deepest.end_ns <= first.start_ns < next_one.end_ns
