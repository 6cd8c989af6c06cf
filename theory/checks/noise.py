"""Measurements of `theory.noise`, and the small training problem that they use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import sagesim
from sagesim import AttentionSpec, Granularity, Rounding
from sagesim.emulator import uniform
from theory import noise
from theory.checks.check import Check, bounded, estimated
from theory.noise import RELIABLE_SAMPLES, effective_rank, sample_moments
from theory.rounding import rounding_moments

TOKENS, WIDTH, HEAD_DIM = 64, 8, 16


def checks() -> Iterator[Check]:
    """The statements on rounding, on standard errors, and on batches of gradients."""
    yield from _rounding()
    yield from _coverage()
    yield from _batches()


@dataclass(frozen=True, slots=True)
class Examples:
    """Sequences x [examples, tokens, width] and one attention head whose W_q is trained.

    The target is the head's output with another W_q. The loss of an example is half the squared
    difference of output and target, and its gradient in W_q is x^T dQ.
    """

    x: Tensor
    w: tuple[Tensor, Tensor, Tensor]  #: W_q, W_k, W_v [width, head_dim]
    target: Tensor  #: [examples, tokens, head_dim]

    @classmethod
    def draw(cls, count: int, *, spread: float, sigma: float = 1.5, seed: int = 0) -> Examples:
        """Draw `count` examples by this seed; the weights are the same for any seed.

        spread is the deviation of a token between examples. The part of x that all examples share
        has the rest of a variance of 1. sigma is the deviation of q and k.
        """
        problem, data = (torch.Generator().manual_seed(s) for s in (0, seed + 1))

        def weight() -> Tensor:
            return torch.randn(WIDTH, HEAD_DIM, generator=problem) / math.sqrt(WIDTH)

        w_q, w_k, w_v, w_target = weight() * sigma, weight() * sigma, weight(), weight() * sigma
        common = torch.randn(TOKENS, WIDTH, generator=problem)
        x = torch.randn(count, TOKENS, WIDTH, generator=data)
        x = math.sqrt(1 - spread**2) * common + spread * x
        target = sagesim.attention(x @ w_target, x @ w_k, x @ w_v, spec=sagesim.FPA)
        return cls(x, (w_q, w_k, w_v), target)

    def exact(self) -> Tensor:
        """The exact gradients in W_q, float64 [examples, width * head_dim]."""
        return torch.cat([self._exact(*part) for part in self._parts(256)])

    def emulated(self, label: str) -> Tensor:
        """The gradients in W_q under the spec of this label."""
        return self._emulated(self.x, self.target, AttentionSpec.parse(label))

    def reseeded(self, label: str, examples: int) -> Tensor:
        """The gradients in W_q under stochastic rounding, with a new seed every few examples.

        examples: the number of examples that share a seed.
        """
        spec = AttentionSpec.parse(label)
        parts = enumerate(self._parts(examples))
        return torch.cat(
            [self._emulated(*p, replace(spec, rounding=Rounding.stochastic(i))) for i, p in parts]
        )

    def _parts(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x.split(size), self.target.split(size), strict=True)

    def _exact(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.double()
        q, k, v = (x @ w.double() for w in self.w)
        o = ((q @ k.mT) / math.sqrt(HEAD_DIM)).softmax(-1) @ v
        return (x.mT @ sagesim.exact(q, k, v, o - target.double()).dq).flatten(1)

    def _emulated(self, x: Tensor, target: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = (x @ w for w in self.w)
        o = sagesim.attention(q.requires_grad_(), k, v, spec=spec)
        (dq,) = torch.autograd.grad(o, q, (o - target).detach())
        return (x.mT @ dq).flatten(1).double()


def batch_means(samples: Tensor, batch: int) -> Tensor:
    """The means of disjoint batches; an incomplete last batch is dropped."""
    whole = len(samples) // batch * batch
    return samples[:whole].unflatten(0, (-1, batch)).mean(1)


def crossing(batches: list[int], noise_square: list[float], error_square: list[float]) -> float:
    """The batch size at which the error curve crosses the noise curve from below.

    Interpolates linearly in logarithms; NaN if the curves do not cross.
    """
    above = [math.log(e / n) for n, e in zip(noise_square, error_square, strict=True)]
    for i in range(1, len(batches)):
        if above[i - 1] < 0 <= above[i]:
            part = above[i - 1] / (above[i - 1] - above[i])
            return batches[i - 1] * (batches[i] / batches[i - 1]) ** part
    return math.nan


def curves(
    gradients: Tensor, errors: Tensor, batches: list[int]
) -> tuple[list[float], list[float]]:
    """The squared noise of a batch's mean gradient and its squared mean error, for each batch size.

    The noise is the variance between batches, so the true mean is not needed.
    """
    noise_square = [sample_moments(batch_means(gradients, b)).trace for b in batches]
    error_square = [float(batch_means(errors, b).square().sum(-1).mean()) for b in batches]
    return noise_square, error_square


def _rounding() -> Iterator[Check]:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    how, block = Granularity.PerToken, 64
    seeds = 256
    draws = [
        sagesim.quantize(x, how, block=block, rounding=Rounding.stochastic(seed))
        for seed in range(seeds)
    ]
    step = draws[0].scale.double()
    errors = torch.stack([(d.codes * step) - x for d in draws])
    variance = noise.stochastic_variance(x.double(), step)
    inputs = f"Gaussian rows, {seeds} seeds"
    yield bounded(
        "noise",
        "stochastic rounding: |mean error| (6 deviations)",
        inputs,
        # Two steps over all seeds on top: errors that occur in few draws are not normal.
        bound=6 * (variance / seeds).sqrt() + 2 * step / seeds,
        measured=errors.mean(0).abs(),
    )
    for name, predicted in (("f (1 - f) step^2", variance), ("step^2 / 6", step**2 / 6)):
        yield estimated(
            "noise",
            f"stochastic rounding: mean square {name}",
            inputs,
            predicted=float(predicted.mean()),
            measured=float(errors.square().mean()),
            within=0.02,
        )
    heads = 4096
    many = torch.rand(heads, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    many[..., 0] = 1.0  # gives all heads the same step
    one = sagesim.quantize(many, how, block=16, rounding=Rounding.stochastic(7))
    step = one.scale.double()
    bias = (one.codes * step - many)[..., 1:].mean(0)
    draw = uniform(7, "q", 16, 16, 0, many.device).double()
    predicted = noise.shared_draw_error(draw, step[0])[..., 1:]
    yield bounded(
        "noise",
        "one seed: mean error - (1/2 - u) step (6 deviations)",
        f"{heads} heads",
        bound=6 * step[0] / math.sqrt(12 * heads),  # f is uniform up to 1 / 127
        measured=(bias - predicted).abs(),
    )
    yield estimated(
        "noise",
        "one seed: RMS of the mean error, step / sqrt(12)",
        f"{heads} heads",
        predicted=float(step.mean()) / math.sqrt(12),
        measured=float(bias.square().mean().sqrt()),
        within=0.1,
    )


SPECTRA = {
    "64 equal directions": torch.ones(64, dtype=torch.float64),
    "64 directions as 1/k": 1 / torch.arange(1, 65, dtype=torch.float64),
    "64 directions as 1/k^2": 1 / torch.arange(1, 65, dtype=torch.float64) ** 2,
    "one direction": torch.ones(1, dtype=torch.float64),
}
"""Eigenvalues of known covariances."""

SAMPLES = RELIABLE_SAMPLES
"""The number of sequences from which |b|^2 is estimated."""


def missed(spectrum: Tensor, signal: float, draws: int = 600, seed: int = 0) -> float:
    """How often |b|^2 is further than two standard errors from its estimate, for Gaussian samples.

    signal: |b|^2 in units of the noise of the mean of `SAMPLES`, tr C / `SAMPLES`. b has the same
        component in every direction.
    """
    generator = torch.Generator().manual_seed(seed)
    square = signal * float(spectrum.sum()) / SAMPLES
    b, count = math.sqrt(square / len(spectrum)), 0
    for _ in range(draws):
        x = torch.randn(SAMPLES, len(spectrum), generator=generator, dtype=torch.float64)
        found = sample_moments(x * spectrum.sqrt() + b)
        count += abs(found.mean_square - square) > 2 * found.mean_square_error
    return count / draws


def _coverage() -> Iterator[Check]:
    for name, spectrum in SPECTRA.items():
        allowed = 0.05 if effective_rank(spectrum) >= 10 else 0.25
        for signal in (0.0, 1.0, 10.0):
            yield bounded(
                "noise",
                f"|b|^2 beyond two standard errors, {SAMPLES} samples",
                f"{name}, |b|^2 = {signal:g} of the noise",
                bound=torch.tensor(allowed),
                measured=torch.tensor(missed(spectrum, signal)),
            )


def _batches() -> Iterator[Check]:
    # The examples resemble each other, so their gradients differ little and the bias exceeds the
    # noise at batches of some hundred. Predictions and measurements use different draws.
    examples, others = (
        Examples.draw(count, spread=0.1, seed=seed) for seed, count in enumerate((4096, 16384))
    )
    gradients, other_gradients = examples.exact(), others.exact()
    spread = sample_moments(gradients)
    batches = [2**i for i in range(11)]
    for label in ("sagebwd", "sagebwd round=stochastic@7"):
        bias = sample_moments(examples.emulated(label) - gradients)
        errors = others.emulated(label) - other_gradients
        parts = [sample_moments(part) for part in errors.split(64)]
        found = torch.tensor([part.mean_square for part in parts])
        yield estimated(
            "noise",
            "standard error of |b|^2 from 64 examples",
            label,
            predicted=math.sqrt(sum(part.mean_square_error**2 for part in parts) / len(parts)),
            measured=float(found.std()),
            within=0.15,
        )
        noise_square, error_square = curves(other_gradients, errors, batches)
        yield estimated(
            "noise",
            "|mean error|^2 of a batch of 64",
            label,
            predicted=float(
                noise.batch_mean_square(bias.mean_square, bias.trace, torch.tensor(64.0))
            ),
            measured=error_square[6],
            within=0.1,
        )
        yield estimated(
            "noise",
            "batch size at which |mean error|^2 exceeds the noise",
            label,
            predicted=noise.visible_batch(bias.mean_square, spread.trace, bias.trace),
            measured=crossing(batches, noise_square, error_square),
            within=0.15,  # about 120 batches, of gradients with few large components
        )
    yield from _shrinkage(examples, gradients)


def _shrinkage(examples: Examples, gradients: Tensor) -> Iterator[Check]:
    part, mean = examples.x[:512].double(), gradients[:512].mean(0)
    q, k, v = (part @ w.double() for w in examples.w)
    o = ((q @ k.mT) / math.sqrt(HEAD_DIM)).softmax(-1) @ v
    do = o - examples.target[:512].double()
    for scales in ("tile", "tile_row"):
        label = f"fpa smooth=k dq=int8@{scales},block"
        t = sagesim.trace(q, k, v, do, spec=AttentionSpec.parse(label))
        k_smoothed = k - k.mean(-2, keepdim=True)
        lost = rounding_moments(t.ds, t.operands["dq.ds"].scale).mean @ k_smoothed
        lost = (part.mT @ lost).flatten(1).mean(0) / math.sqrt(HEAD_DIM)
        error = (part.mT @ t.dq).flatten(1).mean(0) - mean
        yield estimated(
            "noise",
            "shrinkage of the mean gradient, from dS of less than 1.5 steps",
            label,
            predicted=-float(lost @ mean / mean.square().sum()),
            measured=-float(error @ mean / mean.square().sum()),
            within=0.15,
        )
