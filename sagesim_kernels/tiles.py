"""How kernels cut their work. Nothing here changes a number: scales and loops follow the spec's
blocks, and a tile is only how many rows one program owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triton.runtime.errors import OutOfResources


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows that one program owns, and how it is compiled."""

    rows: int
    num_warps: int
    num_stages: int


def most_rows(channels: int, *, if_small: int = 64) -> int:
    """Rows that are fastest on Hopper for a backward's program that keeps sums of this many padded
    channels a row; if_small: those of fewer than 128 channels."""
    if channels < 128:
        return if_small
    return 128 if channels == 128 else 64


def tiles(
    rows: int, channels: int, *, exactly: int | None = None, within: int | None = None
) -> Iterator[Tile]:
    """Tiles to try, best first; the later, the less shared memory they take.

    Args:
        rows: that suit the kernel, if the spec has no say.
        channels: of the sums that it keeps for each row, padded.
        exactly: rows of the spec's block, where a scale is shared by all of them.
        within: rows of the spec's block, where a program must not own rows of two.
    """
    rows = exactly or min(rows, within or rows)
    # As many as it takes for what a thread holds to fit its registers.
    warps = 8 if rows * channels > 64 * 128 else 4
    for stages in (3, 2, 1):
        yield Tile(rows, warps, stages)
    for fewer in (64, 32):
        if exactly is None and fewer < rows:
            yield Tile(fewer, 4, 1)


def launch(candidates: Iterator[Tile], run: Callable[[Tile], Any], what: str) -> None:
    """Run with the first tile that the device has the shared memory for.

    Raises:
        ValueError: naming `what`, where none fits.
    """
    error: OutOfResources | None = None
    for tile in candidates:
        try:
            run(tile)
        except OutOfResources as e:
            error = e
        else:
            return
    raise ValueError(
        f"{what} needs more of a multiprocessor than this device has ({error}); "
        "smaller blocks of the spec need less"
    )
