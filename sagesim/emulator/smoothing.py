"""Smoothing: subtract means from Q and K before they are rounded.

Means are summed in float64 and rounded once, so that codes do not depend on the order of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def subtract_head_mean(k: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Subtract from k [Z, n, d] the mean of its valid tokens; return it and the mean [Z, 1, d].

    valid: bool [Z or 1, n]. Other tokens of k are zero and stay zero.

    Every logit of a row loses the same constant, q . mean(k) * scale. P and O do not change. The
    caller adds the constant, `logit_shift`, to the logsumexp.
    """
    tokens = valid.sum(1).clamp(min=1)[:, None, None]
    mean = (k.double().sum(1, keepdim=True) / tokens).to(k.dtype)
    return (k - mean).masked_fill(~valid[..., None], 0.0), mean


def subtract_block_means(q: Tensor, valid: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Subtract from q [Z, n, d] the means of each block's valid tokens; return it and the means.

    valid: bool [Z or 1, n]. Other tokens of q are zero and stay zero. The means are [Z, blocks, d].

    The caller adds mean . k to the logits of a block, and (column sums of dS) mean^T to dk.
    """
    n = q.shape[1]
    padding = (0, 0, 0, -n % block)
    blocks = torch.nn.functional.pad(q.double(), padding).unflatten(1, (-1, block))
    tokens = torch.nn.functional.pad(valid[..., None], padding).unflatten(1, (-1, block)).sum(2)
    means = (blocks.sum(2) / tokens.clamp(min=1)).to(q.dtype)
    smoothed = q - means.repeat_interleave(block, 1)[:, :n]
    return smoothed.masked_fill(~valid[..., None], 0.0), means


def logit_shift(q: Tensor, k_mean: Tensor, scale: float) -> Tensor:
    """The constant [Z, n_q] that smoothing K subtracts from each row of logits."""
    return (q * k_mean).sum(-1) * scale
