"""Where tests lay tokens in memory, and where the kernels lay codes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def viewed(x: Tensor, view: str) -> Tensor:
    """Return the numbers of x [batch, heads, tokens, channels] with other strides."""
    _, heads, n, d = x.shape
    if view == "offset":  # by one element, so that no row starts at a multiple of 16 bytes
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if view == "stride":  # rows of 73 elements
        return torch.nn.functional.pad(x, (0, 73 - d))[..., :d]
    if view == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if view == "both divisors":  # 72, and heads of 72 n + 8 elements
        rows = torch.nn.functional.pad(x, (0, 72 - d)).flatten(2)
        return torch.nn.functional.pad(rows, (0, 8)).as_strided(
            x.shape, (heads * (72 * n + 8), 72 * n + 8, 72, 1)
        )
    return x


def stored_rows(x: Tensor, cu: Tensor | None) -> Tensor:
    """Return the rows of padded storage that belong to blocks of 64 with a token."""
    rows = [first + torch.arange(-(-n // 64) * 64) for first, n in _stored_sequences(x, cu)]
    return torch.cat(rows).to(x.device)


def stored_tokens(x: Tensor, cu: Tensor | None) -> Tensor:
    """Return the row of each token in padded storage, sequence by sequence."""
    rows = [first + torch.arange(n) for first, n in _stored_sequences(x, cu)]
    return torch.cat(rows).to(x.device)


def _stored_sequences(x: Tensor, cu: Tensor | None) -> list[tuple[int, int]]:
    """Return the first row and the length of each sequence in padded storage."""
    if cu is None:
        n = x.shape[2]
        return [(b * (-(-n // 128) * 128), n) for b in range(x.shape[0])]
    bounds = pairwise(cu.tolist())
    return [((first // 128 + b) * 128, last - first) for b, (first, last) in enumerate(bounds)]
