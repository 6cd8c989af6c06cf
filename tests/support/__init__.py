"""What tests share: inputs, strategies, the four assertions, and independent implementations."""

from hypothesis import settings


def examples(count: int) -> settings:
    """A test's number of examples under the fast profile; longer profiles scale it up."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
