"""Subtract means of Q and K before they are rounded, and what has to be put back for it.

Means are summed in float64 and rounded once, so that no order of summation reaches the codes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def subtract_head_mean(k: Tensor) -> tuple[Tensor, Tensor]:
    """k [Z, n, d], n > 0 -> k less its mean over tokens, and the mean [Z, 1, d].

    Every logit of a row loses the same constant, q . mean(k) * scale: P and O stay, and the
    logsumexp gets it back from `logit_shift`.
    """
    mean = k.double().mean(1, keepdim=True).to(k.dtype)
    return k - mean, mean


def subtract_block_means(q: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """q [Z, n, d] -> q less the mean of each block of tokens, and the means [Z, blocks, d].

    The logits get mean . k back as a rank-one term, and dk the bias branch: column sums of dS
    times the mean.
    """
    n = q.shape[1]
    blocks = -(-n // block)
    padded = torch.nn.functional.pad(q.double(), (0, 0, 0, blocks * block - n))
    tokens = torch.full((blocks, 1), block, dtype=torch.float64, device=q.device)
    tokens[-1] = n - (blocks - 1) * block
    means = (padded.unflatten(1, (blocks, block)).sum(2) / tokens).to(q.dtype)
    return q - means.repeat_interleave(block, 1)[:, :n], means


def logit_shift(q: Tensor, k_mean: Tensor, scale: float) -> Tensor:
    """The constant [Z, n_q] that smoothing K took out of each row of logits."""
    return (q * k_mean).sum(-1) * scale
