"""Changes of the emulator that round an operand by another rule than the spec's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sagesim.emulator import CODE_MAX, FlatProblem, Hooks, Operand, Place, SmoothedQK, to_tiles
from sagesim.fuzzing.changes import Change
from sagesim.problem import AttentionProblem
from sagesim.spec import Precision


class _Rounded(Hooks):
    """Rounds dS to a dtype before anything else uses it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        return ds.to(self._dtype).to(ds.dtype)


def ds_in(dtype: torch.dtype) -> Change:
    """dS is rounded to a dtype before anything else uses it."""
    return Change(hooks=lambda x, problem: _Rounded(dtype))


class _Replaced(Hooks):
    """Rounds some operands by another rule than the spec's.

    Args:
        x, problem: the problem.
        tensors: names of the operands.
        rule: takes the operand before it was rounded, in tiles, and as the spec rounds it.
    """

    def __init__(
        self,
        x: FlatProblem,
        problem: AttentionProblem,
        tensors: str,
        rule: Callable[[Tensor, Operand], Operand],
    ) -> None:
        self._x, self._do = x, x.flatten_queries(problem.gradient)
        self._tensors, self._rule = tensors.split(), rule
        self._maps: dict[str, Tensor] = {}

    def map(self, name: str, place: Place, tiles: Tensor) -> Tensor:
        self._maps[name] = tiles.clone()
        return tiles

    def ds(self, place: Place, ds: Tensor, p: Tensor) -> Tensor:
        self._maps["ds"] = ds.clone()
        return ds

    def operand(self, site: str, tensor: str, place: Place, operand: Operand) -> Operand:
        if tensor not in self._tensors:
            return operand
        return self._rule(self._exact(site, tensor, place, operand), operand)

    def _exact(self, site: str, tensor: str, place: Place, operand: Operand) -> Tensor:
        if tensor == "ds":
            return self._maps["ds"]
        if tensor == "p" and site == "dv":
            return self._maps["p_recompute"]
        if tensor == "p":
            s = self._maps["s"]
            largest = s.amax(-1, keepdim=True)
            # With a scale per tile row, codes are relative to the maximum of the tile's row.
            if operand.scale is None or operand.scale.shape[1:4] != s.shape[1:4]:
                largest = largest.amax(-2, keepdim=True)
            return (s - largest.masked_fill(largest.isinf(), 0.0)).exp()
        if tensor in ("q", "k"):
            smoothed = SmoothedQK.of(self._x, place.heads)
            whole = smoothed.q if tensor == "q" else smoothed.k
        else:
            whole = (self._x.v if tensor == "v" else self._do)[place.heads]
        return to_tiles(whole, operand.values.shape[2], whole.shape[-1])


def truncated(exact: Tensor, operand: Operand) -> Operand:
    """A rule for `rounded_by`: INT8 codes are truncated toward zero."""
    if operand.scale is None or operand.precision is not Precision.INT8:
        return operand
    shared = [axis for axis in range(1, exact.ndim) if operand.scale.shape[axis] == 1]
    amax = exact.abs().amax(shared, keepdim=True)
    inverse = torch.full_like(amax, CODE_MAX[Precision.INT8]) / amax
    codes = (exact * inverse.masked_fill(inverse.isinf(), 0.0)).trunc()
    return replace(operand, values=codes)


def in_dtype(dtype: torch.dtype, precision: Precision) -> Callable[[Tensor, Operand], Operand]:
    """A rule for `rounded_by`: a 16-bit dtype without a scale."""
    return lambda exact, operand: Operand(exact.to(dtype).to(exact.dtype), None, precision)


def rounded_by(rule: Callable[[Tensor, Operand], Operand], tensors: str) -> Change:
    """`rule` rounds the tensors, named in a string such as "p ds".

    It takes an operand before it was rounded, in tiles, and as the spec rounds it.
    """
    return Change(hooks=lambda x, problem: _Replaced(x, problem, tensors, rule))
