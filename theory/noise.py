"""At which batch size the bias of quantized gradients exceeds the gradient noise.

An example (a sequence, or a token) has a gradient g with mean G and covariance Sigma over the
data. Quantization turns it into g + e, where e has mean b and covariance Sigma_q. Averaging over
a batch of B independent examples divides both covariances by B and leaves the bias b unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

RELIABLE_SAMPLES: Final = 256
"""The number of samples from which on the checks hold the standard errors of `sample_moments`."""


@dataclass(frozen=True, slots=True)
class SampleMoments:
    """Unbiased estimates of |E x|^2 and of tr Cov(x) of a random vector x."""

    mean_square: float  #: estimate of |E x|^2; it can be negative
    mean_square_error: float  #: standard error of mean_square, by the jackknife
    trace: float  #: estimate of tr Cov(x)


def sample_moments(samples: Tensor) -> SampleMoments:
    """Estimate |E x|^2 and tr Cov(x) from independent samples x_i [n, p], n >= 2.

    The squared norm of the mean of n samples is |E x|^2 + tr Cov(x) / n in expectation: the noise
    of the mean adds to its norm. Subtracting trace / n removes this, and gives the mean of x_i .
    x_j over all pairs i != j.

    The standard error is the jackknife's: from the n estimates that each leave out one sample. It
    is 0 only if all of them are equal, and NaN for two samples. Its square is too large in
    expectation, by up to (n / (n - 2))^2 times 2 if E x is 0, and by little if |E x|^2 is far above
    the noise. Two standard errors cover |E x|^2 in at least 95 % of samples if n >= 256 and the
    covariance has an effective rank (tr C)^2 / tr C^2 of 10 or more, and in at least 75 % if not;
    see `theory.checks.noise`.

    Raises:
        ValueError: if there are fewer than two samples.

    Source: Hoeffding, Ann. Math. Statist. 19(3), 1948 (U-statistics). Efron and Stein, Ann.
    Statist. 9(3), 1981: the jackknife's variance is not too small in expectation.
    """
    n = len(samples)
    if n < 2:
        raise ValueError(f"{n} samples have no variance")
    x = samples.double()
    mean = x.mean(0)
    centred = x - mean
    trace = float(centred.square().sum()) / (n - 1)
    return SampleMoments(float(mean @ mean) - trace / n, _mean_square_error(mean, centred), trace)


def _mean_square_error(mean: Tensor, centred: Tensor) -> float:
    """The jackknife's standard error of the mean of x_i . x_j over all pairs i != j.

    Without sample i = mean + c_i, the estimate is a constant plus 2 |c_i|^2 - 2 (n - 2) mean . c_i,
    divided by (n - 1) (n - 2). This form cancels nothing large.
    """
    n = len(centred)
    if n < 3:
        return math.nan
    left_out = 2 * centred.square().sum(1) - 2 * (n - 2) * (centred @ mean)
    left_out = (left_out - left_out.mean()) / ((n - 1) * (n - 2))
    return math.sqrt((n - 1) / n * float(left_out.square().sum()))


def mean_square_variance(along: float, trace_of_square: float, n: int) -> float:
    """The variance of `sample_moments(...).mean_square`, for n samples of mean b and covariance C.

    4 b'C b / n + 2 tr(C^2) / (n (n - 1)). The first term is the noise along the mean; the second
    remains if the mean is 0.

    Args:
        along: b'C b.
        trace_of_square: tr(C^2).
        n: the number of samples, at least 2.

    Source: Hoeffding, as above.
    """
    return 4 * along / n + 2 * trace_of_square / (n * (n - 1))


def effective_rank(spectrum: Tensor) -> float:
    """(tr C)^2 / tr C^2 of a covariance with these eigenvalues: how many directions share it."""
    return float(spectrum.sum() ** 2 / spectrum.square().sum())


def noise_scale(trace: float, mean_square: float) -> float:
    """The batch size at which the gradient noise equals the gradient: tr(Sigma) / |G|^2.

    Source: McCandlish et al., arXiv 1812.06162, the "simple" noise scale.
    """
    return trace / mean_square


def visible_batch(bias_square: float, trace: float, trace_quantization: float = 0.0) -> float:
    """The batch size above which |b|^2 exceeds the noise: (tr Sigma + tr Sigma_q) / |b|^2.

    Here the squared error of the mean is 2 |b|^2, half of it noise; it falls to |b|^2 and no lower
    as the batch grows.

    With the relative bias r = |b| / |G| it is `noise_scale` / r^2 * (1 + tr Sigma_q / tr Sigma). A
    relative bias of one percent shows at ten thousand noise scales. T steps in which the parameters
    hardly change count as one batch of T * B examples.

    Assumes that e and g are uncorrelated: only then is the covariance of g + e the sum of both.

    Args:
        bias_square: |b|^2, or an estimate of it.
        trace: tr Sigma.
        trace_quantization: tr Sigma_q.

    Returns: examples; inf if bias_square <= 0, as an unbiased estimate of |b|^2 can be.

    Source: ours.
    """
    return (trace + trace_quantization) / bias_square if bias_square > 0 else math.inf


USEFUL_RATIO: Final = math.sqrt(3)
"""The ratio of gradient to quantization error below which quantized training is less effective.

Source: arXiv 2505.19115, for training in FP4 with stochastic rounding.
"""


def gradient_to_error(square: float, error_square: float) -> float:
    """|G| over the root mean square error of a step's gradient from quantization.

    To be compared with `USEFUL_RATIO`. `visible_batch` asks another question: it compares the bias
    with the noise of the data, and depends on the batch. This ratio compares the error with the
    gradient. As training goes on, |G| falls and the ratio with it, at any batch.

    Args:
        square: |G|^2.
        error_square: the expected squared norm of the error of a step, `batch_mean_square` of |b|^2
            and tr Sigma_q.

    Returns: inf if error_square <= 0, as an unbiased estimate can be; NaN if square < 0.
    """
    if error_square <= 0:
        return math.inf
    return math.sqrt(square / error_square) if square >= 0 else math.nan


def batch_mean_square(bias_square: float, trace: float, batch: Tensor) -> Tensor:
    """The expected |mean over a batch|^2 of vectors of this bias and trace; shaped as `batch`."""
    return bias_square + trace / batch


def nearest_error(x: Tensor, step: Tensor) -> Tensor:
    """The error of x rounded to the nearest multiple of step, ties to even."""
    return (x / step).round() * step - x


def stochastic_variance(x: Tensor, step: Tensor) -> Tensor:
    """The variance of the error of rounding x stochastically to a multiple of step.

    Let x lie the fraction f of a step above the multiple below it. The error is (1 - f) step with
    probability f and -f step otherwise: mean 0, variance f (1 - f) step^2. That is at most step^2 /
    4, and step^2 / 6 on average over f, twice the mean square of rounding to nearest.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications",
    R. Soc. Open Sci. 9, 2022.
    """
    f = x / step
    f = f - f.floor()
    return f * (1 - f) * step**2


def shared_draw_error(uniform: Tensor, step: Tensor) -> Tensor:
    """The mean error over inputs of stochastic rounding with one fixed draw `uniform` in [0, 1).

    With f the fraction of a step that is rounded and u the draw, the error in steps is 1 - f if f >
    u and -f otherwise. Its mean over uniform f is 1/2 - u. So half of the variance of stochastic
    rounding, step^2 / 12, comes from the draw. A seed that never changes turns this half into a
    bias of the same root mean square as the error of rounding to nearest.

    Source: ours.
    """
    return (0.5 - uniform) * step


def flushed(x: Tensor, step: Tensor) -> Tensor:
    """The error of the elements that round to 0 because |x| <= step / 2; 0 for all other elements.

    The error is -x in every example, so it points against the gradient that x carries. The errors
    of the other elements have varying signs.
    """
    return torch.where(x.abs() <= step / 2, -x, torch.zeros_like(x))
