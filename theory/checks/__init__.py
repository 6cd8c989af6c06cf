"""Measurements of every statement of `theory`, one module a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from theory.check import Check

CHECKS: dict[str, Callable[[], Iterator[Check]]] = {}
"""By topic, in the order of the docs: what measures its statements."""
