"""Noise that `docs/numerics.md` allows between two correct implementations.

Correct implementations may differ from the emulator as follows, and `AllowedNoise` simulates it:

- The order of float32 operations and the last bits of exp: every map gets float32 noise.
- Codes of P and dS whose value is nearly a tie. The noise does not look for such values: it
  changes 0.1 % of all codes by 1, drawn at random, and in each head also the code with the largest
  influence on the output.
- P in 16 bit at PV, rounded relative to a running row maximum: it is rounded a second time.

Scales and codes of Q, K, V and dO must be equal bit for bit, so they get no noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from sagesim.emulator import (
    CODE_MAX,
    FlatProblem,
    Hooks,
    Operand,
    Place,
    SmoothedQK,
    to_tiles,
)
from sagesim.fuzzing.calls import Outputs
from sagesim.spec import Delta, Precision

U: Final = 2.0**-24
"""Unit roundoff of float32."""

ELEMENTWISE_ROUNDINGS: Final = 4
"""Float32 roundings of an element besides those of its sum.

S of INT8 operands has four: an exact integer sum is multiplied by two scales and by the logit scale
times log2(e), which is itself rounded. ex2.approx has an error of up to two units in the last place
(CUDA's PTX manual), which is four U.
"""


def over_tokens(count: int) -> float:
    """Largest error of a sum over tokens in any order, relative to the sum of absolute values.

    All roundings may have the same sign, because equal terms round alike. Source: N. Higham,
    "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 3.1.
    """
    return (ELEMENTWISE_ROUNDINGS + count) * U


def over_channels(count: int) -> float:
    """Error of a sum over channels in any order, relative to the sum of absolute values.

    The roundings are independent and add up as a random walk (Higham, section 2.8), even if one
    term is larger than all others together.
    """
    return (ELEMENTWISE_ROUNDINGS + math.sqrt(count)) * U


FLIPPED: Final = 0.001
"""The fraction of the codes of P and dS that may differ by 1. Source: docs/numerics.md."""

_STEP: Final = {Precision.FP16: (2.0**-11, 2.0**-25), Precision.BF16: (2.0**-8, 2.0**-134)}
"""Largest rounding errors: relative for normal numbers, absolute for subnormal ones."""

_SPACING: Final = {Precision.FP8_E4M3: 2.0**-3, Precision.FP8_E5M2: 2.0**-2}
"""Largest distance of an FP8 code to its neighbour, relative to the code."""


class Float32Errors:
    """Errors that the order of float32 sums makes in each tensor of a problem.

    Each is the sum of the absolute values of the terms, times `over_tokens` or `over_channels`.
    Maps are [Z, n_q, n_k].

    Args:
        x: the problem.
        do, o: in the caller's shapes.
        lse: [Z, n_q], of the logits before smoothing.
        maps: "p", "p_recompute", "dp" and "ds".

    The gradient of a sink is a sum of -P_sink delta over rows, with P_sink = exp(sink - L). Its
    error has three parts, which are added as if they had one sign in all rows: that of delta; that
    of P_sink, whose exponent has an error proportional to |sink| + |L|, and with a smoothed K that
    of the shift; and that of the sum.

    outputs: the errors of o, dq, dk, dv and dsinks, in the caller's shapes.
    """

    def __init__(
        self, x: FlatProblem, do: Tensor, o: Tensor, lse: Tensor, maps: Mapping[str, Tensor]
    ) -> None:
        smoothed = SmoothedQK.of(x, slice(None))
        q, k, v = smoothed.q.abs(), smoothed.k.abs(), x.v.abs()
        if smoothed.q_mean is not None:
            q = q + (x.q - smoothed.q).abs()
        self.tokens = {"q": q, "k": k, "v": v, "do": x.flatten_queries(do).abs()}
        p, p_recompute, ds = maps["p"], maps["p_recompute"], maps["ds"].abs()
        scale, channels = abs(x.scale), over_channels(x.q.shape[-1])
        self.s = (q @ k.mT) * (scale * channels)
        self.dp = (self.tokens["do"] @ v.mT) * channels
        self.lse = lse.masked_fill(lse.isinf(), 0.0).abs()
        if smoothed.shift is not None:
            self.lse = self.lse + smoothed.shift.abs()
        if x.spec.delta is Delta.FROM_O:
            terms = x.flatten_queries(do) * x.flatten_queries(o)
            self.delta = terms.abs().sum(-1) * channels
        else:
            terms = p_recompute * maps["dp"]
            self.delta = terms.abs().sum(-1) * over_tokens(x.grid.n_k)
        self.o = (p @ v) * over_tokens(x.grid.n_k)
        # The last bits of K's mean may differ too, so K before smoothing bounds the error of dQ.
        k_whole = k + (x.k - smoothed.k).abs()
        of_keys = over_tokens(x.grid.n_q * x.groups)
        self.outputs = Outputs(
            x.query_heads(self.o),
            x.query_heads(ds @ k_whole) * (scale * over_tokens(x.grid.n_k)),
            x.key_heads(ds.mT @ q) * (scale * of_keys),
            x.key_heads(p_recompute.mT @ self.tokens["do"]) * of_keys,
            self._dsinks(x, smoothed, lse, terms.sum(-1).abs()),
        )

    def _dsinks(self, x: FlatProblem, smoothed: SmoothedQK, lse: Tensor, delta: Tensor) -> Tensor:
        """The errors of the gradients of the sinks, [heads]. delta: its magnitude, [Z, n_q]."""
        if x.sinks is None:
            return delta.new_zeros(x.heads[-1])
        sink = x.sinks[:, None]
        exponent = (sink.abs() + self.lse + 1.0) * (ELEMENTWISE_ROUNDINGS * U)
        if smoothed.k_mean is not None:
            size = (x.q * smoothed.k_mean).abs().sum(-1) * abs(x.scale)
            exponent = exponent + size * over_channels(x.q.shape[-1])
        p_sink = (sink - lse).exp().masked_fill(lse.isinf(), 0.0)
        rows = x.grid.n_q * (x.q.shape[0] // x.heads[-1])
        error = p_sink * (self.delta + delta * (exponent + over_tokens(rows)))
        return error.sum(-1).reshape(-1, x.heads[-1]).sum(0)


class AllowedNoise(Hooks):
    """Adds to intermediates the noise that another correct implementation may have.

    Args:
        x: the problem.
        errors: its float32 errors.
        seed: seed of the noise. With an even seed the float32 noise of every element is drawn
            independently, with its sign. With an odd seed all elements that are changed together
            get one sign and the largest noise, because an error in a constant that they share
            would change all of them in the same direction.
    """

    def __init__(self, x: FlatProblem, errors: Float32Errors, seed: int) -> None:
        self._x, self._errors = x, errors
        self._device = x.q.device
        self._random = torch.Generator().manual_seed(seed)
        self._coherent = seed % 2 == 1

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        """Add float32 noise to a panel of S or dP."""
        errors, spec = self._errors, self._x.spec
        match name:
            case "s" | "s_recompute":
                size = tiles.abs()
                if place.panel is not None and place.panel.masked is not None:
                    size.masked_fill_(place.panel.masked, 0.0)
                # exp(S - m), with m the row's maximum or L, has a relative error proportional to
                # |S| + |m|. The 1 added is for the error of exp itself.
                subtracted = size.amax((-2, -1), keepdim=True)
                if name == "s_recompute":
                    subtracted = torch.maximum(subtracted, self._column(errors.lse, place))
                site = spec.qk if name == "s" else spec.qk_recompute
                error = (size + subtracted + 1.0) * (ELEMENTWISE_ROUNDINGS * U)
                if site.precision is not Precision.INT8 or spec.smoothing.q:
                    error += self._panel(errors.s, place)
                return tiles + self._noise(tiles.shape) * error
            case "dp":
                if spec.dp.precision is Precision.INT8:  # its integer sum is exact
                    error = tiles.abs() * (ELEMENTWISE_ROUNDINGS * U)
                else:
                    error = self._panel(errors.dp, place)
                return tiles + self._noise(tiles.shape) * error
            case _:
                return tiles

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        """Add the noise of delta and of the elementwise operations to a panel of dS."""
        row = self._column(self._errors.delta, place)
        ds = ds + self._noise(row.shape) * row * p
        return ds + self._noise(ds.shape) * ds * (ELEMENTWISE_ROUNDINGS * U)

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        """Change some codes of P or dS by 1; round P in 16 bit at PV a second time."""
        panel = place.panel
        if panel is None:
            return operand
        values = operand.values
        if site == "pv" and operand.precision in _STEP:
            relative, absolute = _STEP[operand.precision]
            step = (values.abs() * relative).clamp_(min=absolute)
            noise = step.mul_(self._uniform(values.shape)).masked_fill_(values == 0, 0.0)
            return replace(operand, values=values + noise)
        if operand.scale is None:
            return operand
        other = {"pv": "v", "dv": "do", "dq": "k", "dk": "q"}[site]
        weight = self._errors.tokens[other][place.heads].amax(-1)
        spec = self._x.spec
        if other in ("k", "v"):
            weight = to_tiles(weight[:, None], 1, spec.block_k)[:, :, :, : panel.key_blocks]
        else:
            rows = to_tiles(weight[..., None], spec.block_q, 1)
            weight = rows[:, panel.first_block : panel.last_block]
        # Codes of 0 are not changed. They occur in regions of zeros, which have scale 1, and no
        # value there is near a tie.
        influence = (weight * operand.scale * (values != 0)).flatten(1)
        flipped = self._uniform(influence.shape) > 1 - 2 * FLIPPED
        flipped.scatter_(1, influence.argmax(1, keepdim=True), True)
        flipped &= influence > 0
        sign = self._uniform(influence.shape).sign()
        code_max = CODE_MAX[operand.precision]
        step = _SPACING.get(operand.precision, 0.0) * values.abs()
        step = step.clamp_(min=1.0 if operand.precision is Precision.INT8 else 0.0)
        changed = values + (sign * flipped).view_as(values) * step
        return replace(operand, values=changed.clamp_(-code_max, code_max))

    def output(self, o: Tensor) -> Tensor:
        """Add the float32 noise of the sum over keys to o."""
        return o + self._noise(o.shape) * self._errors.o

    def _uniform(self, shape: torch.Size) -> Tensor:
        """Numbers in [-1, 1), drawn on the CPU, so that they are equal on every device."""
        return torch.rand(shape, generator=self._random).mul_(2).sub_(1).to(self._device)

    def _noise(self, shape: torch.Size) -> Tensor:
        if self._coherent:
            sign = 1.0 if torch.rand((), generator=self._random) < 0.5 else -1.0
            return torch.full(shape, sign, device=self._device)
        return self._uniform(shape)

    def _panel(self, whole: Tensor, place: Place) -> Tensor:
        """The tiles of a map [Z, n_q, n_k] in the panel of a place."""
        assert place.panel is not None
        tiles = to_tiles(whole[place.heads], self._x.spec.block_q, self._x.spec.block_k)
        blocks = slice(place.panel.first_block, place.panel.last_block)
        return tiles[:, blocks, :, : place.panel.key_blocks]

    def _column(self, rows: Tensor, place: Place) -> Tensor:
        """The part of `rows` [Z, n_q] in the panel of a place; broadcasts over a map's tiles."""
        assert place.panel is not None
        tiles = to_tiles(rows[place.heads][..., None], self._x.spec.block_q, 1)
        return tiles[:, place.panel.first_block : place.panel.last_block]
