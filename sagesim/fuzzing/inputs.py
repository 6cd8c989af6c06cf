"""The kinds of tensors that fuzzing draws.

Each builder takes a numpy generator and a shape [..., n, d] and returns a float32 array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Shape = Any
"""A tuple[int, ...]. It is annotated as Any, because run-time type checkers check a random element
of a tuple, and Hypothesis warns about other random numbers while it draws."""

Builder = Callable[[np.random.Generator, Shape], Array]


def gaussian(rng: np.random.Generator, shape: Shape) -> Array:
    """Independent normal numbers with mean 0 and standard deviation 1."""
    return rng.standard_normal(shape, dtype=np.float32)


def outlier_channel(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian, with one channel multiplied by 50."""
    x = gaussian(rng, shape)
    if shape[-1]:
        x[..., rng.integers(shape[-1])] *= 50
    return x


def outlier_token(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian, with one element of 6e4, close to the largest float16."""
    x = gaussian(rng, shape)
    if shape[-1] and shape[-2]:
        x[..., rng.integers(shape[-2]), rng.integers(shape[-1])] = 6e4
    return x


def zero_block(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian, with zeros in the first half of the tokens."""
    x = gaussian(rng, shape)
    x[..., : (shape[-2] + 1) // 2, :] = 0
    return x


def zeros(rng: np.random.Generator, shape: Shape) -> Array:
    """All zeros."""
    return np.zeros(shape, np.float32)


def half_integer_ties(rng: np.random.Generator, shape: Shape) -> Array:
    """Elements half-way between two INT8 codes.

    Every token and every channel also has an element of magnitude 127, so that its scale is 1.
    """
    x = rng.integers(-127, 127, shape).astype(np.float32) + np.float32(0.5)
    x[..., :1, :] = 127
    x[..., :, :1] = -127
    return x


def constant(rng: np.random.Generator, shape: Shape) -> Array:
    """All tokens are the same Gaussian vector."""
    one = rng.standard_normal((*shape[:-2], 1, shape[-1]), dtype=np.float32)
    return np.broadcast_to(one, shape).copy()


def offset(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian, with a mean of about 30 standard deviations, as the keys of real models have."""
    return (gaussian(rng, shape) + constant(rng, shape) * np.float32(30)).astype(np.float32)


def growing(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian, with tokens that grow from 1/4 to 4.

    The running maximum of an online softmax then grows, and blocks have different scales.
    """
    gains = np.exp2(np.linspace(-2, 2, shape[-2]))
    return (gaussian(rng, shape) * gains[:, None]).astype(np.float32)


def tiny_gain(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian with standard deviation 2**-90."""
    return gaussian(rng, shape) * np.float32(2.0**-90)


def huge_gain(rng: np.random.Generator, shape: Shape) -> Array:
    """Gaussian with standard deviation 2**40."""
    return gaussian(rng, shape) * np.float32(2.0**40)


def subnormal(rng: np.random.Generator, shape: Shape) -> Array:
    """Small multiples of the smallest float32; 127 / amax overflows."""
    return (rng.integers(-1000, 1000, shape) * 2.0**-149).astype(np.float32)


def named(*builders: Builder) -> dict[str, Builder]:
    """Builders by their function names."""
    return {builder.__name__: builder for builder in builders}


KINDS: Final = named(
    gaussian, constant, zero_block, zeros, outlier_channel, growing, offset, half_integer_ties
)
"""The kinds that `sagesim.fuzz` draws, simplest first. Each is multiplied by a power of two."""
