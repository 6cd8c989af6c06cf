"""Recognise a mask in the form of a tensor: a causal mask, a window, key padding, or both.

Nothing is guessed: a mask is recognised only if the options give the same mask, entry by entry.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sagesim.problem.attention_problem import AttentionProblem
from sagesim.problem.masks import Band, broadcasts
from sagesim.problem.options import NO_WINDOW

Problem = TypeVar("Problem", bound=AttentionProblem)


def boolean_mask(mask: Tensor) -> Tensor:
    """A floating mask of 0 and -inf alone as a boolean one, True attends; any other unchanged.

    A mask that requires a gradient is a bias that is learned, whatever it holds.
    """
    if mask.requires_grad:
        return mask
    if mask.is_floating_point() and bool(((mask == 0) | (mask == -math.inf)).all()):
        return mask == 0
    return mask


def recognised(problem: Problem) -> Problem:
    """The problem with options in place of attn_mask, if they mean the same.

    The mask must be the same for all heads. Any other mask remains, as a boolean one if it is a
    floating mask of 0 and -inf. q has four axes.
    """
    if problem.attn_mask is None:
        return problem
    mask = boolean_mask(problem.attn_mask)
    problem = replace(problem, attn_mask=mask)
    if mask.dtype is not torch.bool or problem.q.ndim != 4 or problem.is_masked_otherwise:
        return problem
    (batch, heads, n_q, _), n_k = problem.q.shape, problem.k.shape[-2]
    if not broadcasts(mask, (batch, heads, n_q, n_k)):
        return problem
    mask = mask[(None,) * (4 - mask.ndim)]
    if not torch.equal(mask, mask[:, :1].expand_as(mask)):
        return problem
    mask = mask[:, 0].expand(-1, n_q, n_k)
    keys = mask.any(1)
    for band in _bands(mask):
        options = _options(band, n_q, n_k)
        if options is None or not torch.equal(_mask_of(band, keys, n_q), mask):
            continue
        key_mask = None if bool(keys.all()) else keys.expand(batch, n_k)
        return replace(problem, attn_mask=None, key_mask=key_mask, **options)
    return problem


def _bands(mask: Tensor) -> list[Band]:
    """The bands that a mask [batch, n_q, n_k] may be, those with fewer limits first."""
    query, key = mask.any(0).nonzero(as_tuple=True)
    if len(query) == 0:
        return [Band(None, None)]
    diagonals = key - query
    lowest, highest = int(diagonals.min()), int(diagonals.max())
    limits = ((None, None), (None, highest), (lowest, None), (lowest, highest))
    return [Band(*each) for each in limits]


def _mask_of(band: Band, keys: Tensor, n_q: int) -> Tensor:
    """The mask [batch, n_q, n_k] of a band and a key mask [batch, n_k]."""
    n_k = keys.shape[1]
    query = torch.arange(n_q, device=keys.device)[:, None]
    by_band = band.attends(query, torch.arange(n_k, device=keys.device))
    by_key = keys[:, None].expand(-1, n_q, -1)
    return by_key if by_band is None else by_key & by_band


def _options(band: Band, n_q: int, n_k: int) -> dict[str, Any] | None:
    """is_causal, window and causal_alignment of a band; None if it has none."""
    if band == Band(None, None):
        return {"is_causal": False, "window": NO_WINDOW}
    for alignment, offset in (("upper_left", 0), ("lower_right", n_k - n_q)):
        left = -1 if band.lowest is None else offset - band.lowest
        right = -1 if band.highest is None else band.highest - offset
        if (band.lowest is not None and left < 0) or (band.highest is not None and right < 0):
            continue
        is_causal = right == 0 and left < 0
        window = NO_WINDOW if is_causal else (left, right)
        return {"is_causal": is_causal, "window": window, "causal_alignment": alignment}
    return None
