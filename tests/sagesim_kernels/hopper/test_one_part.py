"""Up to 128 keys, a program of Hopper's backward stores dQ. It has the bits of its integer sum."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sagesim import FACTORED_QK, AttentionSpec, Smoothing
from tests.sagesim_kernels.hopper.marks import ON_HOPPER
from tests.support.kernels import Results, assert_same, kernel_case, poisoned, run_kernels
from tests.support.many_steps import ManySteps

pytestmark = [
    *ON_HOPPER,
    pytest.mark.usefixtures("unplanned"),
]

UNSMOOTHED = replace(FACTORED_QK, smoothing=Smoothing())

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "upper_left": {"is_causal": True},
    "window": {"window": (70, 60), "causal_alignment": "lower_right"},
}


def never(*_: Any) -> bool:
    """Stands for `has_one_part`."""
    return False


def both_ways(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> list[Results]:
    """Return the results of a call, and those with sums of dQ; see `run_kernels`."""
    from sagesim_kernels.hopper import backward

    asked: list[bool] = []
    answer = backward.has_one_part

    def watched(*args: Any) -> bool:
        asked.append(answer(*args))
        return asked[-1]

    with monkeypatch.context() as patch:
        patch.setattr(backward, "has_one_part", watched)
        with poisoned():
            stored = run_kernels(*args, **options)
        assert asked == [True]
        patch.setattr(backward, "has_one_part", never)
        return [stored, run_kernels(*args, **options)]


@pytest.mark.parametrize(
    ("lengths", "heads", "d", "dtype", "mask", "spec"),
    [
        ((300, 77), (2, 2), 64, torch.bfloat16, "full", FACTORED_QK),
        ((65, 128), (2, 8), 128, torch.float16, "full", FACTORED_QK),
        ((200, 128), (1, 3), 72, torch.bfloat16, "upper_left", FACTORED_QK),
        ((64, 5), (5, 5), 40, torch.float16, "upper_left", FACTORED_QK),
        ((130, 128), (4, 4), 64, torch.float16, "window", FACTORED_QK),
        ((130, 128), (4, 4), 128, torch.bfloat16, "window", FACTORED_QK),
        ((130, 128), (4, 4), ManySteps(128), torch.bfloat16, "window", FACTORED_QK),
        ((65, 128), (2, 8), ManySteps(128), torch.float16, "full", FACTORED_QK),
        ((300, 77), (2, 2), 64, torch.bfloat16, "full", UNSMOOTHED),
    ],
)
def test_dq_has_the_bits_of_its_sum(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    d: int,
    dtype: torch.dtype,
    mask: str,
    spec: AttentionSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_q, n_k = lengths
    c = kernel_case(dtype, seed=7, n_q=n_q, n_k=n_k, d=d, heads=heads)
    stored, summed = both_ways(monkeypatch, c, spec, **MASKS[mask])
    assert_same(stored, summed)
    assert bool(stored.dq.isfinite().all()) and bool(stored.dq.any())


@pytest.mark.parametrize("tensor", range(4))
@pytest.mark.parametrize("d", [64, 128, ManySteps(128)])
def test_nan_reaches_dq(d: int, tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = kernel_case(torch.bfloat16, seed=2, n_q=200, n_k=100, d=d, heads=(2, 3))
    c.qkvdo[tensor][1, 1, 20, 5] = math.nan
    stored, summed = both_ways(monkeypatch, c, FACTORED_QK)
    assert_same(stored, summed)
    assert not bool(stored.dq[1, 1].isfinite().all())


@pytest.mark.parametrize("d", [64, 128, ManySteps(128)])
def test_a_ds_that_overflows_in_float16_reaches_dq(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c = kernel_case(torch.float16, seed=5, n_q=200, n_k=128, d=d, heads=(2, 2))
    c = replace(c, v=c.v * 120)
    c.do[..., 1::2, :] *= 8192.0
    stored, summed = both_ways(monkeypatch, c, FACTORED_QK)
    assert_same(stored, summed)
    assert bool(stored.dq.isnan().any()) and bool(stored.dq[..., ::2, :].isfinite().all())


def test_calls_with_another_term_of_dq_add_it() -> None:
    """A gradient of the logsumexp adds to each row of dS, and so the mean of K to dQ."""
    c = kernel_case(torch.bfloat16, seed=1, n_q=100, n_k=77, d=64, heads=(2, 2))
    c = replace(c, k=c.k + 3.0)
    none, ones = (
        run_kernels(c, FACTORED_QK, d_lse=d_lse)
        for d_lse in (None, torch.ones(c.q.shape[:-1]).cuda())
    )
    added = (ones.dq.float() - none.dq.float()).mean()
    assert float(added) == pytest.approx(3.0 * c.q.shape[-1] ** -0.5, rel=0.1)
