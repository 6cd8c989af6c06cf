"""Numbers that are named for what they are: the kinds of tensor that fuzzing draws from.

Each builder takes a numpy generator and a shape [..., n, d] and gives float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Shape = Any
"""tuple[int, ...]. Run-time type checkers look at a random element of one of those, and Hypothesis
would rather that nothing random went on while it draws."""

Builder = Callable[[np.random.Generator, Shape], Array]


def gaussian(rng: np.random.Generator, shape: Shape) -> Array:
    """Independent, mean 0, deviation 1."""
    return rng.standard_normal(shape, dtype=np.float32)


def outlier_channel(rng: np.random.Generator, shape: Shape) -> Array:
    """One channel 50 times the others."""
    x = gaussian(rng, shape)
    if shape[-1]:
        x[..., rng.integers(shape[-1])] *= 50
    return x


def outlier_token(rng: np.random.Generator, shape: Shape) -> Array:
    """One element of 6e4, about the largest number of a half-precision tensor."""
    x = gaussian(rng, shape)
    if shape[-1] and shape[-2]:
        x[..., rng.integers(shape[-2]), rng.integers(shape[-1])] = 6e4
    return x


def zero_block(rng: np.random.Generator, shape: Shape) -> Array:
    """The first half of the tokens are zero."""
    x = gaussian(rng, shape)
    x[..., : (shape[-2] + 1) // 2, :] = 0
    return x


def zeros(rng: np.random.Generator, shape: Shape) -> Array:
    """Nothing but zeros."""
    return np.zeros(shape, np.float32)


def half_integer_ties(rng: np.random.Generator, shape: Shape) -> Array:
    """Every token and every channel has amax 127 and so scale 1; all other elements lie half way
    between two codes."""
    x = rng.integers(-127, 127, shape).astype(np.float32) + np.float32(0.5)
    x[..., :1, :] = 127
    x[..., :, :1] = -127
    return x


def constant(rng: np.random.Generator, shape: Shape) -> Array:
    """Every token is the same vector."""
    one = rng.standard_normal((*shape[:-2], 1, shape[-1]), dtype=np.float32)
    return np.broadcast_to(one, shape).copy()


def offset(rng: np.random.Generator, shape: Shape) -> Array:
    """A mean 30 deviations from zero, as the keys of real models have."""
    return (gaussian(rng, shape) + constant(rng, shape) * np.float32(30)).astype(np.float32)


def growing(rng: np.random.Generator, shape: Shape) -> Array:
    """Every token a little larger than the one before, the last 16 times the first: the running
    maximum of an online softmax moves, and blocks differ in scale."""
    gains = np.exp2(np.linspace(-2, 2, shape[-2]))
    return (gaussian(rng, shape) * gains[:, None]).astype(np.float32)


def tiny_gain(rng: np.random.Generator, shape: Shape) -> Array:
    """Deviation 2**-90."""
    return gaussian(rng, shape) * np.float32(2.0**-90)


def huge_gain(rng: np.random.Generator, shape: Shape) -> Array:
    """Deviation 2**40."""
    return gaussian(rng, shape) * np.float32(2.0**40)


def subnormal(rng: np.random.Generator, shape: Shape) -> Array:
    """Multiples of the smallest float32, so small that 127 / amax overflows."""
    return (rng.integers(-1000, 1000, shape) * 2.0**-149).astype(np.float32)


def named(*builders: Builder) -> dict[str, Builder]:
    """The builders by their names."""
    return {builder.__name__: builder for builder in builders}


KINDS: Final = named(
    gaussian, constant, zero_block, zeros, outlier_channel, growing, offset, half_integer_ties
)
"""What `sagesim.fuzz` draws, simplest first; each times a power of two."""
