"""How far a later token reaches an earlier row of causal attention, through shared scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.emulator import attention
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Influence:
    """The largest change of rows before a token when that token and all later ones are replaced,
    in units of the root mean square of the tensor. Exactly 0 for attention itself."""

    o: float
    dq: float


def influence(
    spec: AttentionSpec, *, tokens: int = 256, head_dim: int = 64, draws: int = 8, seed: int = 0
) -> Influence:
    """Measure on Gaussian inputs, the cut at every eighth of the sequence and one token later.

    Args:
        draws: heads, each with inputs of its own.

    >>> from sagesim import CAUSAL_SAFE
    >>> influence(CAUSAL_SAFE, tokens=96, draws=1)
    Influence(o=0.0, dq=0.0)
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 4, 1, draws, tokens, head_dim)
    before, after = torch.randn(shape, generator=generator)
    reference = _o_and_dq(before, spec)
    largest = [0.0, 0.0]
    for eighth in range(1, 8):
        for cut in (tokens * eighth // 8, tokens * eighth // 8 + 1):
            changed = torch.cat([before[..., :cut, :], after[..., cut:, :]], -2)
            for i, (new, old) in enumerate(zip(_o_and_dq(changed, spec), reference, strict=True)):
                change = (new[..., :cut, :] - old[..., :cut, :]).abs().max()
                largest[i] = max(largest[i], float(change / old.square().mean().sqrt()))
    return Influence(*largest)


def _o_and_dq(x: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    q, k, v, do = x
    q = q.clone().requires_grad_()
    o = attention(q, k, v, spec=spec, is_causal=True)
    (dq,) = torch.autograd.grad(o, q, do)
    return o.detach(), dq
