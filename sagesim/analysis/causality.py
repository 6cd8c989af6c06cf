"""How much later tokens change earlier rows of causal attention, through shared scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagesim.emulator import attention
from sagesim.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Influence:
    """The largest change of an earlier row if a token and all later ones are replaced.

    In units of the tensor's RMS. Exactly 0 if no scale is shared between earlier and later tokens.
    """

    o: float
    dq: float


def influence(
    spec: AttentionSpec, *, tokens: int = 256, head_dim: int = 64, draws: int = 8, seed: int = 0
) -> Influence:
    """Measure how much later tokens change earlier rows of o and dq, on Gaussian inputs.

    Each run replaces the tokens from one position to the end of the sequence. The positions are
    the multiples of one eighth of the length, and the position after each of them. The result is
    the largest change over all these runs.

    Args:
        spec: the spec of the attention, which is causal.
        tokens: length of the sequence, at least 8.
        head_dim: size of a head, at least 1.
        draws: number of heads, at least 1, each with its own inputs.
        seed: seed of the inputs.

    Raises:
        ValueError: if a number is too small. The message names it.

    >>> from sagesim import CAUSAL_SAFE
    >>> influence(CAUSAL_SAFE, tokens=96, draws=1)
    Influence(o=0.0, dq=0.0)
    """
    for name, number, least in (
        ("tokens", tokens, 8),
        ("head_dim", head_dim, 1),
        ("draws", draws, 1),
    ):
        if number < least:
            raise ValueError(f"{name}={number} is less than {least}")
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
