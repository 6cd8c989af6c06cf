"""Which keys a key mask leaves."""

import pytest
import torch
from torch import Tensor

from sagesim import AttentionSpec
from sagesim_kernels.operands import key_padding
from tests.sagesim_kernels.contract import check
from tests.sagesim_kernels.kernel_cases import DEVICE, low_logits


def described(mask: list[bool]) -> tuple[list[int], tuple[int, int, int]]:
    """The counts and the runs of one sequence, key by key."""
    n = len(mask)
    live = [key for key in range(n) if mask[key]]
    counts = [sum(mask[:key]) for key in range(n + 1)]
    if not live:
        return counts, (n, n, 0)
    padding = [key for key in range(live[0], n) if not mask[key]]
    return counts, (live[0], min(padding, default=n), live[-1] + 1)


def masks(n: int) -> Tensor:
    """Padding nowhere, everywhere, on the left, on the right, on both sides, and anywhere."""
    key = torch.arange(n)
    generator = torch.Generator().manual_seed(n)
    half = torch.rand(n, generator=generator) < 0.5
    most = torch.rand(n, generator=generator) < 0.95
    several = [key >= 0, key < 0, key >= n // 3, key < n // 3]
    return torch.stack([*several, (key >= n // 4) & (key < n - n // 4), half, most])


@pytest.mark.parametrize("n", [1, 2, 63, 128, 129, 700])
@pytest.mark.parametrize("chunk", [128, 4096])
def test_counts_and_runs(n: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_padding, "_CHUNK", chunk)
    every = masks(n)
    found = key_padding.find_live_keys(every.to(DEVICE))
    for b, mask in enumerate(every):
        counts, runs = described(mask.tolist())
        assert found.mask[b].tolist() == mask.int().tolist()
        assert found.counts[b].tolist() == counts
        assert tuple(found.runs[b].tolist()) == runs


def test_a_mask_may_have_any_strides() -> None:
    mask = torch.tensor([True, False, True, True], device=DEVICE)
    found = key_padding.find_live_keys(mask[:, None].expand(4, 3).T)
    assert found.counts.tolist() == [[0, 1, 1, 2, 3]] * 3
    assert found.runs.tolist() == [[0, 1, 4]] * 3


def test_padding_has_no_influence_where_logits_are_low() -> None:
    check(low_logits(64, 150), AttentionSpec.parse("factored_qk smooth=none"))
