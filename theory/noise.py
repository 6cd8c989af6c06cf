"""When quantization shows in training: its systematic error against the noise of the gradient.

One example (a sequence, a token) gives a gradient g with mean G and covariance Sigma over the
data; quantized it gives g + e, where e has mean b and covariance Sigma_q. A batch of B examples
divides the covariances by B and leaves b. Batches are of independent examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleMoments:
    """Unbiased estimates of a random vector's squared mean and of its variance."""

    mean_square: float  #: of |E x|^2; may come out below 0
    mean_square_error: float  #: standard error of mean_square
    trace: float  #: of tr Cov(x)


def sample_moments(samples: Tensor) -> SampleMoments:
    """Estimates from independent samples [n, p], n >= 2.

    |mean of n samples|^2 is on average |E x|^2 + tr(Cov) / n: the noise of the mean has a norm
    too. Less trace / n it is unbiased, and equals the mean of x_i . x_j over all pairs i != j.

    Raises:
        ValueError: for fewer than two samples.

    Source: Hoeffding, Ann. Math. Statist. 19(3), 1948 (U-statistics).
    """
    n = len(samples)
    if n < 2:
        raise ValueError(f"{n} samples have no variance")
    x = samples.double()
    mean = x.mean(0)
    centred = x - mean
    trace = float(centred.square().sum()) / (n - 1)
    wide = x.shape[1] > n
    squares = (centred @ centred.mT if wide else centred.mT @ centred).square().sum()
    # The sample's figures are too large by what n samples of no covariance would show.
    trace_of_square = max(0.0, float(squares) / (n - 1) ** 2 - trace**2 / (n - 1))
    along = float((centred @ mean).square().sum()) / (n - 1) - trace_of_square / n
    variance = max(0.0, mean_square_variance(along, trace_of_square, n))
    return SampleMoments(float(mean @ mean) - trace / n, math.sqrt(variance), trace)


def mean_square_variance(along: float, trace_of_square: float, n: int) -> float:
    """The variance of `sample_moments(...).mean_square` over n samples of covariance C and mean b.

    4 b'C b / n + 2 tr(C^2) / (n (n - 1)); along is b'C b. The first term is the noise of the mean
    along itself, the second what is left where the mean is 0.

    Source: Hoeffding, as above.
    """
    return 4 * along / n + 2 * trace_of_square / (n * (n - 1))


def noise_scale(trace: float, mean_square: float) -> float:
    """The batch at which noise equals the gradient: tr(Sigma) / |G|^2.

    Source: McCandlish et al., arXiv 1812.06162, the "simple" noise scale.
    """
    return trace / mean_square


def visible_batch(bias_square: float, trace: float, trace_quantization: float = 0.0) -> float:
    """The batch above which |b|^2 exceeds the noise: (tr Sigma + tr Sigma_q) / |b|^2.

    Relative to the gradient, with r = |b| / |G|: `noise_scale` / r^2, and
    1 + trace_quantization / trace times that. A bias of one percent shows at ten thousand
    noise scales. inf where there is no bias: bias_square <= 0, as an unbiased estimate can be.

    The sum of the traces is that of the quantized gradient where e and g are uncorrelated.
    Steps at which the parameters hardly move add up: T of them are one batch of T * B.

    Source: ours.
    """
    return (trace + trace_quantization) / bias_square if bias_square > 0 else math.inf


def batch_mean_square(bias_square: float, trace: float, batch: Tensor) -> Tensor:
    """Expected |mean over a batch|^2 of vectors of this mean and covariance; shaped as batch."""
    return bias_square + trace / batch


def nearest_error(x: Tensor, step: Tensor) -> Tensor:
    """The error of x rounded to the nearest multiple of step, ties to even."""
    return (x / step).round() * step - x


def stochastic_variance(x: Tensor, step: Tensor) -> Tensor:
    """The variance of the error of x rounded up with the probability of its distance from below.

    With f the fraction of a step above the multiple below, the error is (1 - f) step with
    probability f and -f step otherwise: mean 0, variance f (1 - f) step^2. At most step^2 / 4,
    and step^2 / 6 on average over f, twice that of rounding to nearest.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications",
    R. Soc. Open Sci. 9, 2022.
    """
    f = x / step
    f = f - f.floor()
    return f * (1 - f) * step**2


def shared_draw_error(uniform: Tensor, step: Tensor) -> Tensor:
    """The mean error over inputs of stochastic rounding that always draws this number in [0, 1).

    For f uniform the mean over f of (1 - f) [f > u] - f [f <= u] is 1/2 - u. Half of the
    variance of stochastic rounding, step^2 / 12, is thus the draw's. A seed that never changes
    makes it a bias, as large as the error of rounding to nearest.

    Source: ours.
    """
    return (0.5 - uniform) * step


def flushed(x: Tensor, step: Tensor) -> Tensor:
    """The error of the elements that are rounded to 0 because they are below half a step; else 0.

    It is -x, and so points against the gradient that x carries, in every example alike. Errors
    of the other elements change sign from element to element.
    """
    return torch.where(x.abs() <= step / 2, -x, torch.zeros_like(x))
