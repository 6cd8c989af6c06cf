"""Which keys a key mask or lengths leave."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sagesim import AttentionSpec
from sagesim_kernels import attention
from sagesim_kernels.operands import key_padding
from tests.sagesim_kernels.contract import check
from tests.sagesim_kernels.kernel_cases import DEVICE, low_logits
from tests.support.kernels import assert_same, kernel_case, run_kernels


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


@pytest.mark.parametrize(("batch", "n_k"), [(0, 3), (0, 0), (2, 0)])
def test_a_mask_of_nothing(batch: int, n_k: int) -> None:
    q, k = torch.ones(batch, 1, 5, 16, device=DEVICE), torch.ones(batch, 1, n_k, 16, device=DEVICE)
    mask = torch.ones(batch, n_k, dtype=torch.bool, device=DEVICE)
    for _ in range(2):  # the second call repeats the launches of the first
        o, lse = attention(q, k, k, key_mask=mask, return_lse=True)
        assert o.shape == q.shape and not o.any()
        assert (lse == -torch.inf).all()


def test_a_mask_may_have_any_strides() -> None:
    mask = torch.tensor([True, False, True, True], device=DEVICE)
    found = key_padding.find_live_keys(mask[:, None].expand(4, 3).T)
    assert found.counts.tolist() == [[0, 1, 1, 2, 3]] * 3
    assert found.runs.tolist() == [[0, 1, 4]] * 3


def test_padding_has_no_influence_where_logits_are_low() -> None:
    check(low_logits(64, 150), AttentionSpec.parse("factored_qk smooth=none"))


LENGTHS: dict[str, Callable[[], Tensor]] = {
    "every other": lambda: torch.tensor([9, 0, 30, 5], device=DEVICE)[::2],
    "a column": lambda: torch.tensor([[9, 1], [30, 2]], dtype=torch.int32, device=DEVICE)[:, 0],
    "one for all": lambda: torch.tensor([9], device=DEVICE).expand(2),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_may_have_any_strides(name: str) -> None:
    lengths = LENGTHS[name]()
    case = kernel_case(torch.float16, seed=3, n_q=20, n_k=40, d=16, heads=(2, 1))
    spec = AttentionSpec.parse("factored_qk")
    found, expected = (
        run_kernels(case, spec, seqused_k=x) for x in (lengths, lengths.clone().contiguous())
    )
    assert_same(found, expected)


@pytest.mark.parametrize("length", [2**40, 2**32 + 5, -3, -(2**32) + 5])
def test_kernels_limit_lengths(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU lengths are not checked. They may be larger than an int32 holds."""
    monkeypatch.setattr("sagesim_kernels.api.check_lengths", lambda *_: None)
    case = kernel_case(torch.float16, seed=3, n_q=20, n_k=40, d=16, heads=(1, 1))
    spec = AttentionSpec.parse("factored_qk")
    limited = torch.tensor([min(max(length, 0), 40)], device=DEVICE)
    found = run_kernels(case, spec, seqused_k=torch.tensor([length], device=DEVICE))
    assert_same(found, run_kernels(case, spec, seqused_k=limited))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["seqused_k", "key_mask"])
def test_a_nan_does_not_reach_a_block_of_padding(name: str) -> None:
    """Of a query, it reaches dK and dV of its block of keys, of which some are no padding."""
    case = kernel_case(torch.float16, seed=3, n_q=40, n_k=130, d=16, heads=(1, 1))
    case.q[0, 0, 30, 2] = math.nan
    lengths = torch.tensor([70], device=DEVICE)
    padding = lengths if name == "seqused_k" else torch.arange(130, device=DEVICE)[None] < lengths
    spec = AttentionSpec.parse("factored smooth=none block=32x32")
    found = run_kernels(case, spec, **{name: padding})
    for x in (found.dk, found.dv):
        assert x[0, 0, :70].isnan().any()
        assert (x[0, 0, 96:] == 0.0).all()
