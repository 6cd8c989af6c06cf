"""The emulator, as another right implementation would compute: with noise where it may differ.

`docs/numerics.md` leaves an implementation these freedoms, and `Freedoms` takes all of them:

- the order of float32 operations, and the last bits of exp: every map gets float32 noise;
- codes of P and dS off by 1, at near ties: 0.1 % of them, and the most influential one of a head;
- P in 16 bit at PV rounded relative to a running row maximum: an independent rounding.

Scales and codes of Q, K, V and dO agree bit for bit, hence get no noise.
"""

from __future__ import annotations

import math
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
    Trace,
    to_tiles,
)
from sagesim.fuzzing.cases import Outputs
from sagesim.spec import Delta, Precision

U: Final = 2.0**-24
"""Unit roundoff of float32."""

FEW: Final = 4
"""Roundings of a float32 result that is no sum.

S of INT8 operands has four: its integer sum times two scales and the logit scale times log2(e),
itself rounded. ex2.approx is good to two units in the last place (CUDA's PTX manual), or four U.
"""


def over_tokens(count: int) -> float:
    """Error of a sum over tokens, relative to the sum of absolute values, in any order: all of
    its roundings, because equal terms round alike. Source: N. Higham, "Accuracy and Stability of
    Numerical Algorithms", 2nd ed., section 3.1."""
    return (FEW + count) * U


def over_channels(count: int) -> float:
    """Likewise of a sum over channels, whose roundings are independent: they add up as a random
    walk does (Higham, section 2.8), also where one term is larger than the others together."""
    return (FEW + math.sqrt(count)) * U


FLIPPED: Final = 0.001
"""The part of the codes of P and dS that may differ by 1. Source: docs/numerics.md."""

_STEP: Final = {Precision.FP16: (2.0**-11, 2.0**-25), Precision.BF16: (2.0**-8, 2.0**-134)}
"""Largest rounding errors: relative to normal numbers, and absolute among the subnormal ones."""

_SPACING: Final = {Precision.FP8_E4M3: 2.0**-3, Precision.FP8_E5M2: 2.0**-2}
"""From one code of FP8 to the next, relative to the larger one's power of two."""


class Errors:
    """Float32's errors: each tensor with its terms' absolute values added, times what
    `over_tokens` and `over_channels` say. Maps are [Z, n_q, n_k].

    outputs: of o, dq, dk and dv, in the caller's shapes.
    """

    def __init__(self, x: FlatProblem, do: Tensor, t: Trace) -> None:
        def flat(y: Tensor) -> Tensor:
            return y.reshape(x.q.shape[0], *y.shape[len(x.heads) :]).to(x.q.dtype)

        everything = SmoothedQK.of(x, slice(None))
        q, k, v = everything.q.abs(), everything.k.abs(), x.v.abs()
        if everything.q_mean is not None:
            q = q + (x.q - everything.q).abs()
        self.tokens = {"q": q, "k": k, "v": v, "do": x.flatten_queries(do).abs()}
        p, p_recompute, ds = flat(t.p), flat(t.p_recompute), flat(t.ds).abs()
        scale, channels = abs(x.scale), over_channels(x.q.shape[-1])
        self.s = (q @ k.mT) * (scale * channels)
        self.dp = (self.tokens["do"] @ v.mT) * channels
        self.lse = flat(t.lse).masked_fill(flat(t.lse).isinf(), 0.0).abs()
        if everything.shift is not None:
            self.lse = self.lse + everything.shift.abs()
        if x.spec.delta is Delta.FROM_O:
            self.delta = (self.tokens["do"] * x.flatten_queries(t.o).abs()).sum(-1) * channels
        else:
            self.delta = (p_recompute * flat(t.dp).abs()).sum(-1) * over_tokens(x.grid.n_k)
        self.o = (p @ v) * over_tokens(x.grid.n_k)
        # K as it was before smoothing: its mean's last bits belong to what may differ in dQ.
        k_whole = k + (x.k - everything.k).abs()
        of_keys = over_tokens(x.grid.n_q * x.groups)
        self.outputs = Outputs(
            x.query_heads(self.o),
            x.query_heads(ds @ k_whole) * (scale * over_tokens(x.grid.n_k)),
            x.key_heads(ds.mT @ q) * (scale * of_keys),
            x.key_heads(p_recompute.mT @ self.tokens["do"]) * of_keys,
        )


class Freedoms(Hooks):
    """Replaces intermediates by what another correct implementation might compute.

    Args:
        seed: of the noise. An even seed draws a sign for every element; an odd one draws one sign
            for a whole map, as the rounding of a shared constant would have.
    """

    def __init__(self, x: FlatProblem, errors: Errors, seed: int) -> None:
        self._x, self._errors = x, errors
        self._device = x.q.device
        self._random = torch.Generator().manual_seed(seed)
        self._coherent = seed % 2 == 1

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        """A panel of S or dP with float32 noise."""
        errors, spec = self._errors, self._x.spec
        match name:
            case "s" | "s_recompute":
                size = tiles.abs()
                if place.panel is not None and place.panel.masked is not None:
                    size.masked_fill_(place.panel.masked, 0.0)
                # exp subtracts the row's maximum, or L, from S; 1 stands for exp's own error.
                top = size.amax((-2, -1), keepdim=True)
                if name == "s_recompute":
                    top = torch.maximum(top, self._column(errors.lse, place))
                site = spec.qk if name == "s" else spec.qk_recompute
                error = (size + top + 1.0) * (FEW * U)
                if site.precision is not Precision.INT8 or spec.smoothing.q:
                    error += self._panel(errors.s, place)
                return tiles + self._noise(tiles.shape) * error
            case "dp":
                of_int8 = spec.dp.precision is Precision.INT8
                error = tiles.abs() * (FEW * U) if of_int8 else self._panel(errors.dp, place)
                return tiles + self._noise(tiles.shape) * error
            case _:
                return tiles

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        """A panel of dS with the noise of delta and of its own operations."""
        row = self._column(self._errors.delta, place)
        ds = ds + self._noise(row.shape) * row * p
        return ds + self._noise(ds.shape) * ds * (FEW * U)

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        """P or dS with codes changed by 1; P in 16 bit at PV rounded a second time."""
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
        # Codes 0 are left out: regions of zeros have scale 1, and no tie is near.
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
        """o with the float32 noise of its sum over keys."""
        return o + self._noise(o.shape) * self._errors.o

    def _uniform(self, shape: torch.Size) -> Tensor:
        """In [-1, 1), drawn on the CPU, so that it is the same on every device."""
        return torch.rand(shape, generator=self._random).mul_(2).sub_(1).to(self._device)

    def _noise(self, shape: torch.Size) -> Tensor:
        if self._coherent:
            sign = 1.0 if torch.rand((), generator=self._random) < 0.5 else -1.0
            return torch.full(shape, sign, device=self._device)
        return self._uniform(shape)

    def _panel(self, whole: Tensor, place: Place) -> Tensor:
        """The tiles of a map [Z, n_q, n_k] at a place."""
        assert place.panel is not None
        tiles = to_tiles(whole[place.heads], self._x.spec.block_q, self._x.spec.block_k)
        blocks = slice(place.panel.first_block, place.panel.last_block)
        return tiles[:, blocks, :, : place.panel.key_blocks]

    def _column(self, rows: Tensor, place: Place) -> Tensor:
        """The rows [Z, n_q] of a place, to broadcast over a map's tiles."""
        assert place.panel is not None
        tiles = to_tiles(rows[place.heads][..., None], self._x.spec.block_q, 1)
        return tiles[:, place.panel.first_block : place.panel.last_block]
