"""Looking before sleeping is given up where it does not help, and tried again now and then."""

from transports.patience import Patience


def waits(patience: Patience, count: int, *, come: bool) -> int:
    """Wait so often, for others who would come while somebody looks or would not; return how often that looked."""
    looked = 0
    for _ in range(count):
        if patience.take():
            looked += 1
            patience.learn(came=come)
    return looked


def test_it_looks_as_long_as_that_helps() -> None:
    assert waits(Patience(), 100, come=True) == 100


def test_after_three_times_in_vain_it_looks_every_sixteenth_time() -> None:
    patience = Patience()
    assert waits(patience, 3, come=False) == 3
    assert waits(patience, 160, come=False) == 10


def test_once_it_helps_again_it_looks_always() -> None:
    patience = Patience()
    waits(patience, 3, come=False)
    assert waits(patience, 15, come=True) == 0
    assert waits(patience, 100, come=True) == 100


def test_where_somebody_else_needs_the_cores_it_is_given_up_for_longer() -> None:
    patience = Patience()
    assert patience.take()
    patience.give_up()
    assert [patience.take() > 0 for _ in range(64)] == [False] * 63 + [True]
    patience.learn(came=True)
    assert waits(patience, 100, come=True) == 100
