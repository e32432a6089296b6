"""How many examples a property has whose examples take long: a share of the profile's, which are few every day."""

from hypothesis import settings


def one_in(parts: int) -> settings:
    """Return settings with one in `parts` of the examples of the profile, at least one."""
    return settings(max_examples=max(1, settings().max_examples // parts))
