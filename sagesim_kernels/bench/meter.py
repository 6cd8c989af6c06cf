"""The interface to a device. Tests replace it, so everything else runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Seconds of one run."""

    device: float  #: from the start of the first kernel to the end of the last one
    host: float  #: until the host has launched all kernels
    waited: bool = False  #: whether the device may have waited for the host in between


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel that ran on the device."""

    name: str
    seconds: float


class Meter(Protocol):
    """A clock and a profiler of one device."""

    def elapsed(self, prepare: Callable[[], Callable[[], object]]) -> Elapsed:
        """Time the function that prepare() returns, from cold caches. prepare is not timed."""
        ...

    def loop(self, run: Callable[[], object], calls: int) -> float:
        """Seconds for each of so many calls in a row, until the device has finished the last."""
        ...

    def added_bytes(self, run: Callable[[], object]) -> int:
        """The peak of allocated memory during run, above the memory allocated before it."""
        ...

    def kernels(self, run: Callable[[], object]) -> list[Kernel]:
        """The kernels that one run launches, in order; empty if no profiler supports the device."""
        ...

    def clock_mhz(self) -> int | None:
        """The current clock of the multiprocessors; None if it cannot be read."""
        ...

    def synchronize(self) -> None:
        """Wait for the device.

        Raises:
            RuntimeError: if the device can no longer be used.
        """
        ...
