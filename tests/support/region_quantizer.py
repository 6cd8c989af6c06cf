"""Quantize one region at a time in numpy, with Python's rounding.

An implementation of docs/numerics.md, "From numbers to codes", that is independent of the package.
"""

import math
from collections.abc import Iterator

import numpy as np

Region = tuple[slice, slice]


def regions(n: int, m: int, granularity: str, block: int | tuple[int, int]) -> Iterator[Region]:
    """The regions of an [n, m] matrix whose elements share a scale, each as rows and columns."""
    rows, columns = (block, m) if isinstance(block, int) else block
    height = {
        "head": n,
        "block": rows,
        "token": 1,
        "channel": n,
        "block_channel": rows,
        "tile": rows,
        "tile_row": 1,
        "tile_column": rows,
        "row": 1,
    }[granularity]
    width = {
        "head": m,
        "block": m,
        "token": m,
        "channel": 1,
        "block_channel": 1,
        "tile": columns,
        "tile_row": columns,
        "tile_column": 1,
        "row": m,
    }[granularity]
    for top in range(0, n, height):
        for left in range(0, m, width):
            yield slice(top, min(top + height, n)), slice(left, min(left + width, m))


def quantize_region(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """INT8 codes and float32 scale of one region, rounded half-even."""
    amax = np.float32(max(abs(float(value)) for value in x.flat))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / amax
    if np.isinf(inverse):
        return np.zeros(x.shape, np.int8), np.float32(1)
    scaled = x * inverse  # float32 times float32, with one rounding
    # Python's round() of a float is exact, ties to even.
    codes = [max(-127, min(127, round(float(value)))) for value in scaled.flat]
    return np.array(codes, np.int8).reshape(x.shape), amax / np.float32(127)


def quantize_matrix(
    x: np.ndarray, granularity: str, block: int | tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The codes of an [n, m] float32 matrix and the scale of every element."""
    codes, scales = np.zeros(x.shape, np.int8), np.full(x.shape, np.nan, np.float32)
    for rows, columns in regions(*x.shape, granularity, block):
        codes[rows, columns], scales[rows, columns] = quantize_region(x[rows, columns])
    assert not any(math.isnan(scale) for scale in scales.flat), "a region was left out"
    return codes, scales
