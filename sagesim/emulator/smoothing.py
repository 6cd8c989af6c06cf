"""Subtract means of Q and K before they are rounded, and what has to be put back for it.

Means are summed in float64 and rounded once, so that no order of summation reaches the codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def subtract_head_mean(k: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """k [Z, n, d] -> k less the mean of its live tokens, and the mean [Z, 1, d].

    live: bool [Z or 1, n]; other tokens are zero, before and after.

    Every logit of a row loses the same constant, q . mean(k) * scale: P and O stay, and the
    logsumexp gets it back from `logit_shift`.
    """
    tokens = live.sum(1).clamp(min=1)[:, None, None]
    mean = (k.double().sum(1, keepdim=True) / tokens).to(k.dtype)
    return (k - mean).masked_fill(~live[..., None], 0.0), mean


def subtract_block_means(q: Tensor, live: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """q [Z, n, d] -> q less the mean of each block's live tokens, and the means [Z, blocks, d].

    live: bool [Z or 1, n]; other tokens are zero, before and after.

    The logits get mean . k back as a rank-one term, and dk the bias branch: column sums of dS
    times the mean.
    """
    n = q.shape[1]
    padding = (0, 0, 0, -n % block)
    blocks = torch.nn.functional.pad(q.double(), padding).unflatten(1, (-1, block))
    tokens = torch.nn.functional.pad(live[..., None], padding).unflatten(1, (-1, block)).sum(2)
    means = (blocks.sum(2) / tokens.clamp(min=1)).to(q.dtype)
    smoothed = q - means.repeat_interleave(block, 1)[:, :n]
    return smoothed.masked_fill(~live[..., None], 0.0), means


def logit_shift(q: Tensor, k_mean: Tensor, scale: float) -> Tensor:
    """The constant [Z, n_q] that smoothing K took out of each row of logits."""
    return (q * k_mean).sum(-1) * scale
