"""Find races in the shared memory of a block: accesses of two warps without a barrier between them.

The warps of a block run in lock step here, so a race does not change a result. On a GPU it may. So
each access is compared with those since the last barrier of all threads. Accesses of one warp are
taken to be in order. A barrier of some threads only counts as none.

An asynchronous copy writes from its issue until its warp has waited for it. No warp may read the
bytes meanwhile, and other warps only after a barrier that follows the wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]
"""Positions in shared memory."""

_NONE, _SEVERAL = -1, -2
"""In place of a warp."""


class Race(Exception):
    """Two accesses to a byte of shared memory whose order is not fixed."""


class SharedAccesses:
    """What warps have done with each byte since the last barrier of all threads."""

    def __init__(self, size: int, warps: int, blocks: int = 1) -> None:
        """size: bytes of each block, whose memories follow each other. warps: of all blocks."""
        self._size, self._warps, self._blocks = size, warps // blocks, blocks
        self._writer = np.full(blocks * size, _NONE, np.int8)
        self._reader = np.full(blocks * size, _NONE, np.int8)
        self._copier = np.full(blocks * size, _NONE, np.int8)  #: of a copy that is not complete
        self._issued: list[list[Bytes]] = [[] for _ in range(warps)]
        self._groups: list[list[list[Bytes]]] = [[] for _ in range(warps)]

    def barrier(self, blocks: Any = 0) -> None:
        """All threads of a block have met, or of each block that a mask chooses."""
        for accesses in (self._writer, self._reader):
            accesses.reshape(self._blocks, -1)[blocks] = _NONE

    def read(self, warps: int | Bytes, places: Bytes) -> None:
        """A warp reads. warps: the one that reads all bytes, or that of each byte.

        Raises:
            Race: if another warp wrote without a barrier since, or if a copy is not complete.
        """
        self._check(
            warps, places, self._copier, "reads", "is being copied to by", is_own_wrong=True
        )
        self._check(warps, places, self._writer, "reads", "was written by")
        before = self._reader[places]
        now = np.where((before == _NONE) | (before == warps), warps, _SEVERAL)
        self._reader[places] = now
        self._reader[places[self._reader[places] != now]] = _SEVERAL  # read by several warps here

    def write(self, warp: int, places: Bytes, same: Bytes | None = None) -> None:
        """A warp writes.

        Args:
            same: bytes that it sets to what they are. Compilers let several warps write one number.
                The order of these writes does not matter.

        Raises:
            Race: if another warp read or wrote without a barrier since, or if a copy is under way.
        """
        what = "writes"
        self._check(warp, places, self._copier, what, "is being copied to by", is_own_wrong=True)
        self._check(warp, places, self._writer, what, "was written by")
        self._check(warp, places, self._reader, what, "was read by")
        self._writer[places] = warp
        if same is not None:
            self._writer[same] = np.where(self._writer[same] == _NONE, _NONE, warp)

    def copy(self, warp: int, places: Bytes) -> None:
        """A warp issues an asynchronous copy; it raises what `write` does."""
        self.write(warp, places)
        self._copier[places] = warp
        self._issued[warp].append(places)

    def commit(self, warp: int) -> None:
        """The copies that a warp has issued since the last commit form a group."""
        self._groups[warp].append(self._issued[warp])
        self._issued[warp] = []

    def wait(self, warp: int, groups: int) -> None:
        """A warp waits until at most the last `groups` groups are under way."""
        count = len(self._groups[warp]) - groups
        for group in self._groups[warp][: max(count, 0)]:
            for places in group:
                self._copier[places] = _NONE
                self._writer[places] = warp
        del self._groups[warp][: max(count, 0)]

    def _check(
        self,
        warps: int | Bytes,
        places: Bytes,
        others: Bytes,
        what: str,
        how: str,
        *,
        is_own_wrong: bool = False,
    ) -> None:
        found = others[places]
        wrong = found != _NONE if is_own_wrong else (found != _NONE) & (found != warps)
        if wrong.any():
            at = int(places[wrong][0]) % self._size
            warp = int(np.broadcast_to(warps, wrong.shape)[wrong][0]) % self._warps
            other = int(found[wrong][0])
            who = "several warps" if other == _SEVERAL else f"warp {other % self._warps}"
            raise Race(f"warp {warp} {what} byte {at} of shared memory, which {how} {who}")
