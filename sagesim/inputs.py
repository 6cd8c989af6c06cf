"""The arguments of an attention call, checked once and laid out for the emulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagesim.arguments import check_scale, check_spec, check_tensors, resolve_input16
from sagesim.grid import Grid
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Inputs:
    """One attention problem: heads flattened to one axis Z, K and V repeated for grouped queries.

    q [Z, n_q, d], k [Z, n_k, d], v [Z, n_k, d_v] in float32, or float64 where the caller's are;
    zero at tokens that are no part of the problem (see `sagesim.grid.Grid.live`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    spec: AttentionSpec  #: no site is INPUT16
    grid: Grid
    dtype: torch.dtype  #: the caller's; o and the gradients are rounded to it
    heads: tuple[int, ...]  #: the caller's leading shape of q
    groups: int  #: query heads for each head of k and v
    live: tuple[Tensor, Tensor]  #: `sagesim.grid.Grid.live`, of queries and of keys

    def widen(self, x: Tensor) -> Tensor:
        """A tensor with q's heads and tokens as [Z, n_q, m], laid out as q is."""
        return _lay_out(x, self.q.dtype, self.live[0])

    def query_heads(self, x: Tensor) -> Tensor:
        """[Z, ...] with the caller's leading shape of q."""
        return x.unflatten(0, self.heads) if self.heads else x.squeeze(0)

    def key_heads(self, x: Tensor) -> Tensor:
        """[Z, ...] summed over each group of query heads, with the caller's leading shape of k."""
        if self.groups == 1:
            return self.query_heads(x)
        x = x.unflatten(0, (*self.heads[:-1], self.heads[-1] // self.groups, self.groups))
        return x.sum(len(self.heads))


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> Inputs:
    """Lay out a call's arguments, or say what is wrong with them.

    Raises:
        TypeError: unequal or non-float dtypes, a spec that is none, or a scale that is no number.
        ValueError: shapes that do not fit each other, unequal devices, a mask that is not
            boolean, or a mask together with is_causal.
    """
    check_spec(spec)
    check_scale(scale)
    groups = check_tensors(q, k, v, enable_gqa=enable_gqa)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"q, k and v are {q.dtype}; float16, bfloat16, float32 or float64 needed")
    n_q, n_k = q.shape[-2], k.shape[-2]
    if attn_mask is not None:
        attn_mask = _flat_mask(attn_mask, (*q.shape[:-1], n_k), is_causal)
    compute = torch.float64 if q.dtype is torch.float64 else torch.float32
    if groups > 1:
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    spec = _resolve(spec, q.dtype, n_q, n_k)
    grid = Grid(n_q, n_k, spec.block_q, spec.block_k, is_causal, attn_mask)
    live_q, live_k = grid.live(q.device)
    return Inputs(
        q=_lay_out(q, compute, live_q),
        k=_lay_out(k, compute, live_k),
        v=_lay_out(v, compute, live_k),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        spec=spec,
        grid=grid,
        dtype=q.dtype,
        heads=tuple(q.shape[:-2]),
        groups=groups,
        live=(live_q, live_k),
    )


def _flat_mask(mask: Tensor, shape: tuple[int, ...], is_causal: bool) -> Tensor:
    """A boolean mask broadcastable to [*heads, n_q, n_k] as [Z or 1, n_q, n_k]."""
    if is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other")
    if mask.dtype is not torch.bool:
        raise ValueError(
            f"attn_mask is {mask.dtype}; only boolean masks (True attends) are emulated"
        )
    try:
        full = mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} does not broadcast to {shape}"
        ) from None
    if all(size == 1 for size in mask.shape[:-2]):
        return mask.reshape(mask.shape[-2:]).expand(shape[-2:])[None]
    return full.reshape(math.prod(shape[:-2]), *shape[-2:])


def _lay_out(x: Tensor, dtype: torch.dtype, live: Tensor) -> Tensor:
    """[*heads, n, m] -> a copy [Z, n, m] with zeros at tokens that are not live.

    Contiguous, and as a copy on a 64 byte boundary: neither the caller's strides nor offsets
    shall reach a sum (see `sagesim.matmul.product`).
    """
    flat = x.to(dtype).contiguous().reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return flat.masked_fill(~live[..., None], 0.0)


def _resolve(spec: AttentionSpec, dtype: torch.dtype, n_q: int, n_k: int) -> AttentionSpec:
    """`spec` with INPUT16 replaced by the inputs' own 16-bit format, and with blocks no larger
    than the sequence, which are the same blocks with less padding."""
    spec = replace(
        spec, block_q=min(spec.block_q, max(n_q, 1)), block_k=min(spec.block_k, max(n_k, 1))
    )
    return resolve_input16(spec, dtype)
