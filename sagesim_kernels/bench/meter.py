"""What is asked of a device, so that everything else can be run without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds of one run."""

    device: float  #: from its first kernel's start to its last one's end
    host: float  #: until all of it was launched


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch that the device ran."""

    name: str
    seconds: float


class Meter(Protocol):
    """A clock and a profiler of one device."""

    def elapsed(self, prepare: Callable[[], Callable[[], object]]) -> Elapsed:
        """Time what prepare() returns, with cold caches; prepare itself is not timed."""
        ...

    def added_bytes(self, run: Callable[[], object]) -> int:
        """The most memory that was in use at once during run, above what was before."""
        ...

    def kernels(self, run: Callable[[], object]) -> list[Kernel]:
        """What one run launches, in order; empty where no profiler sees the device."""
        ...

    def clock_mhz(self) -> int | None:
        """Of the multiprocessors, now; None where it cannot be read."""
        ...

    def synchronize(self) -> None:
        """Wait for the device. Raises RuntimeError where it can no longer be used."""
        ...
