"""How kernels divide their work among programs.

Nothing here changes a number. Scales and loops follow the blocks of the spec; a tile is only the
queries or keys that one program owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from triton.runtime.errors import OutOfResources

from sagesim_kernels.launching import CompilerFault
from sagesim_kernels.operands import LAUNCH

SHORT_STEP: Final = 32
"""The shortest step of a loop over queries."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows (queries or keys) that a program owns, and how the program is compiled."""

    rows: int
    num_warps: int
    num_stages: int
    step: int = 0  #: queries or keys of a step of the loop; 0 for a block of the spec
    registers: int = 0  #: the most registers of a thread; 0 for as many as there are

    @property
    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit, **LAUNCH}


def longest_step(block_q: int) -> int:
    """Return the queries of a step of a loop: a block of the spec, or a part of a long one."""
    return block_q if block_q <= 128 else 64


def most_rows(channels: int) -> int:
    """Return the fastest number of queries of a program that recomputes P, on Hopper.

    channels: padded channels of Q.
    """
    return 128 if channels == 128 else 64


def block_tiles(rows: int, channels: int, *, any_step: bool) -> Iterator[Tile]:
    """Yield the tiles to try for a program that owns one block of the spec, the best first.

    Args:
        rows: the rows of the block.
        channels: padded channels of each of the sums that the program keeps.
        any_step: whether a step of the loop may be shorter than a block of the spec: no element
            shares a scale with one of another row, and no sum over a block must be exact.
    """
    warps = block_warps(rows, channels)
    for stages in (2, 1):
        yield Tile(rows, warps, stages)
    if any_step and channels > 128:
        yield Tile(rows, warps, 1, step=SHORT_STEP)


def block_warps(rows: int, channels: int) -> int:
    """Return the warps of a program of `block_tiles`."""
    return 8 if rows * channels > 64 * 128 else 4


def tiles(rows: int, channels: int, *, within: int | None = None) -> Iterator[Tile]:
    """Yield the tiles to try, the best first; each needs no more shared memory than the one before.

    Args:
        rows: the number of rows that suits the kernel.
        channels: padded channels of the sums that the program keeps for each row.
        within: rows of the spec's block, if a program must not own rows of two blocks.
    """
    rows = min(rows, within or rows)
    # With 4 warps, a thread has no registers for more sums.
    warps = 8 if rows * channels > 64 * 128 else 4
    for stages in (3, 2, 1):
        yield Tile(rows, warps, stages)
    for fewer in (64, 32):
        if fewer < rows:
            yield Tile(fewer, 4, 1)


def try_tiles(candidates: Iterable[Tile], run: Callable[[Tile], Any], what: str) -> None:
    """Call `run` with the first tile whose program fits into the device's shared memory.

    Raises:
        ValueError: if no tile fits; the message names `what`.
        CompilerFault: if those that fit are compiled wrongly.
    """
    error: OutOfResources | CompilerFault | None = None
    for tile in candidates:
        try:
            run(tile)
        except (OutOfResources, CompilerFault) as e:
            error = e
        else:
            return
    if isinstance(error, CompilerFault):
        raise error
    raise ValueError(
        f"{what} needs more of a multiprocessor than this device has ({error}); "
        "a spec with smaller blocks needs less"
    )
