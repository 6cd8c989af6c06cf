"""Check an attention problem and lay it out for the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagesim.emulator.tiling import Grid
from sagesim.problem import AttentionProblem, check_spec, resolve_input16
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class FlatProblem:
    """One attention problem with all heads on one axis Z, and K and V repeated for grouped queries.

    q [Z, n_q, d], k [Z, n_k, d] and v [Z, n_k, d_v] are float32, or float64 if the caller's are.
    Padding is zero: queries that attend to no key, and keys that no query attends to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    spec: AttentionSpec  #: no site is INPUT16; blocks are no longer than the sequences
    grid: Grid
    dtype: torch.dtype  #: the caller's; o and the gradients are rounded to it
    heads: tuple[int, ...]  #: the caller's leading shape of q
    groups: int  #: query heads for each head of k and v
    valid: tuple[Tensor, Tensor]  #: which queries and keys are not padding; see `Grid.valid_tokens`
    sinks: Tensor | None  #: [Z] in the computing dtype
    softcap: float | None

    def flatten_queries(self, x: Tensor) -> Tensor:
        """A tensor [*heads, n_q, m] as [Z, n_q, m] in the computing dtype, zero at padding."""
        return _flatten(x, self.q.dtype, self.valid[0])

    def query_heads(self, x: Tensor) -> Tensor:
        """A tensor [Z, ...] with the caller's leading shape of q instead of Z."""
        return x.unflatten(0, self.heads) if self.heads else x.squeeze(0)

    def key_heads(self, x: Tensor) -> Tensor:
        """A tensor [Z, ...] summed over each group of query heads, with k's leading shape."""
        if self.groups == 1:
            return self.query_heads(x)
        x = x.unflatten(0, (*self.heads[:-1], self.heads[-1] // self.groups, self.groups))
        return x.sum(len(self.heads))


def flatten(problem: AttentionProblem, spec: AttentionSpec) -> FlatProblem:
    """Check a problem and a spec, and return the problem laid out for the emulator.

    Raises:
        TypeError, ValueError: as `AttentionProblem.check`; TypeError also if spec is not an
            AttentionSpec.
    """
    check_spec(spec)
    groups = problem.check()
    q, k, v = problem.q, problem.k, problem.v
    n_q, n_k = q.shape[-2], k.shape[-2]
    mask, key_mask, sinks = problem.attn_mask, problem.key_mask, problem.sinks
    if mask is not None:
        mask = _flat_mask(mask, (*q.shape[:-1], n_k))
    if key_mask is not None:
        key_mask = _flat_key_mask(key_mask, q)
    compute = torch.float64 if q.dtype is torch.float64 else torch.float32
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    spec = _resolve(spec, q.dtype, n_q, n_k)
    grid = Grid(n_q, n_k, spec.block_q, spec.block_k, problem.band, key_mask, mask)
    valid_q, valid_k = grid.valid_tokens(q.device)
    return FlatProblem(
        q=_flatten(q, compute, valid_q),
        k=_flatten(k, compute, valid_k),
        v=_flatten(v, compute, valid_k),
        scale=problem.logit_scale,
        spec=spec,
        grid=grid,
        dtype=q.dtype,
        heads=tuple(q.shape[:-2]),
        groups=groups,
        valid=(valid_q, valid_k),
        sinks=None if sinks is None else sinks.to(compute).expand(q.shape[:-2]).reshape(-1),
        softcap=problem.softcap,
    )


def _flat_key_mask(key_mask: Tensor, q: Tensor) -> Tensor:
    """A key mask [*batch, n_k] as [Z, n_k], or as [1, n_k] if there is a single sequence."""
    n_k = key_mask.shape[-1]
    if math.prod(key_mask.shape[:-1]) == 1:
        return key_mask.reshape(1, n_k)
    return key_mask[..., None, :].expand(*q.shape[:-2], n_k).reshape(-1, n_k)


def _flat_mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A boolean mask broadcastable to [*heads, n_q, n_k] as [Z or 1, n_q, n_k]."""
    if all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(mask.shape[-2:]).expand(shape[-2:])[None]
    return mask.expand(shape).reshape(math.prod(shape[:-2]), *shape[-2:])


def _flatten(x: Tensor, dtype: torch.dtype, valid: Tensor) -> Tensor:
    """A copy [Z, n, m] of x [*heads, n, m] with zeros at padding.

    The copy is contiguous and begins on a 64 byte boundary, so that the caller's strides and
    offsets cannot change the order of a sum (see `matmul.product`).
    """
    flat = x.to(dtype).contiguous().reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return flat.masked_fill(~valid[..., None], 0.0)


def _resolve(spec: AttentionSpec, dtype: torch.dtype, n_q: int, n_k: int) -> AttentionSpec:
    """`spec` with INPUT16 replaced, and with blocks no longer than the sequences.

    A block longer than the sequence holds the same tokens and more padding.
    """
    spec = replace(
        spec, block_q=min(spec.block_q, max(n_q, 1)), block_k=min(spec.block_k, max(n_k, 1))
    )
    return resolve_input16(spec, dtype)
