"""Helpers of tests: inputs, strategies, the four assertions, and independent implementations."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Set a test's number of examples in the fast profile; other profiles scale it."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
