"""Which keys a key mask leaves: how many come before each key, and where their first run is."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.rounding import LAUNCH

_CHUNK: Final = 4096
"""Keys that a program looks at in one step."""


class LiveKeys(NamedTuple):
    """The keys that a key mask leaves, for each sequence."""

    mask: Tensor  #: see `Lengths.key_mask`
    counts: Tensor  #: see `Lengths.key_counts`
    runs: Tensor  #: see `Lengths.key_runs`


@triton.jit
def count_keys_kernel(mask, counts, runs, n_k, CHUNK: tl.constexpr):
    """Count the keys of a sequence that are no padding, and find their first run and their end."""
    wait_for_earlier_kernels()
    b = tl.program_id(0).to(tl.int64)
    mask += b * n_k
    counts += b * (n_k + 1)
    tl.store(counts, 0)
    before = tl.cast(0, tl.int32)
    first = tl.cast(n_k, tl.int32)
    first_end = tl.cast(n_k, tl.int32)
    last_end = tl.cast(0, tl.int32)
    for start in range(0, n_k, CHUNK):
        key = start + tl.arange(0, CHUNK)
        is_key = key < n_k
        is_live = tl.load(mask + key, mask=is_key, other=0) != 0
        number = is_live.to(tl.int32)
        tl.store(counts + 1 + key, before + tl.cumsum(number, 0), mask=is_key)
        before += tl.sum(number, 0)
        first = tl.minimum(first, tl.min(tl.where(is_live, key, n_k), 0))
        is_padding = (key > first) & ~is_live
        first_end = tl.minimum(first_end, tl.min(tl.where(is_padding, key, n_k), 0))
        last_end = tl.maximum(last_end, tl.max(tl.where(is_live, key + 1, 0), 0))
    tl.store(runs + b * 3, first)
    tl.store(runs + b * 3 + 1, first_end)
    tl.store(runs + b * 3 + 2, last_end)


def find_live_keys(key_mask: Tensor) -> LiveKeys:
    """Describe a key mask, bool [sequences, n_k]."""
    sequences, n_k = key_mask.shape
    mask = key_mask.contiguous().view(torch.int8)
    counts = torch.empty((sequences, n_k + 1), dtype=torch.int32, device=mask.device)
    runs = torch.empty((sequences, 3), dtype=torch.int32, device=mask.device)
    chunk = min(_CHUNK, max(triton.next_power_of_2(n_k), 128))
    launch(count_keys_kernel, (sequences,), mask, counts, runs, n_k, chunk, **LAUNCH)
    return LiveKeys(mask, counts, runs)
