"""What long commands say of themselves: nothing at first, then how far they are and how long it will take."""

from overlap.cli.pace import pace


def told_by(looks, capsys):
    """Return the lines of a command that looks at the clock at these instants."""
    clock = iter([0.0, *looks, 40.0])
    with pace(lambda: next(clock)) as tell:
        for number, _ in enumerate(looks):
            tell(number, 4, f"piece {number}")
    return capsys.readouterr().err.splitlines()


def test_a_short_command_says_nothing(capsys):
    assert told_by([0.1, 1.0, 1.9], capsys) == []


def test_a_long_one_says_how_far_it_is_and_how_long_it_takes_at_most_each_ten_seconds(capsys):
    assert told_by([0.5, 4.0, 9.0, 15.0], capsys) == [
        "overlap: 1 of 4 done in 4 s, about 12 s left; piece 1",
        "overlap: 3 of 4 done in 15 s, about 5 s left; piece 3",
        "overlap: done in 40 s",
    ]
