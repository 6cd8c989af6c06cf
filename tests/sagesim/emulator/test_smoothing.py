import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagesim.emulator.smoothing import logit_shift, subtract_block_means, subtract_head_mean
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.inputs import MILD, NASTY, constant
from tests.support.strategies import blocks, seeds, tensors


def every(x: torch.Tensor) -> torch.Tensor:
    """All tokens are live."""
    return torch.ones(1, x.shape[1], dtype=torch.bool)


def mean(tokens: np.ndarray) -> np.ndarray:
    """The correctly rounded mean over the first axis of [n, d]: exact sums, one division."""
    return np.array([math.fsum(map(float, c)) / len(c) for c in tokens.T], np.float64)


@given(x=tensors(NASTY, heads=(2,)))
@examples(60)
def test_the_mean_of_k_is_the_exact_mean_rounded_once(x):
    """Float64 sums of at most 130 float32 numbers err by 2**-46 at most, relative to the sum of
    absolute values; unless that reaches a tie, float32 sees the exact mean. It may be off by one
    last place of float32 where it does."""
    smoothed, found = subtract_head_mean(x, every(x))
    for head in range(2):
        exact = mean(x[head].numpy())
        spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
        absolute = x[head].double().abs().mean(0).numpy() * 2.0**-45
        assert_within_bound(
            actual=found[head, 0],
            exact=torch.from_numpy(exact),
            bound=torch.from_numpy(spacing / 2 + absolute),
            what="mean",
        )
    assert_bitwise(
        actual=smoothed,
        expected=torch.from_numpy(x.numpy() - found.numpy()),
        what="K less its mean",
    )


@given(x=tensors(NASTY, heads=(1,)), seed=seeds)
@examples(60)
def test_the_order_of_tokens_does_not_reach_the_mean(x, seed):
    """Float64 sums of float32 numbers of like size are exact to float32."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(x.shape[1]))
    one, other = (
        subtract_head_mean(x, every(x))[1],
        subtract_head_mean(x[:, order], every(x[:, order]))[1],
    )
    assert_bitwise(actual=other, expected=one, what="mean")


@given(x=tensors(NASTY, heads=(2,)), block=blocks)
@examples(60)
def test_block_means_of_q_are_those_of_a_loop_over_blocks(x, block):
    """Each block's mean over its valid tokens, the tail's over the tail alone."""
    smoothed, means = subtract_block_means(x, every(x), block)
    n = x.shape[1]
    assert means.shape[1] == math.ceil(n / block)
    for index, start in enumerate(range(0, n, block)):
        tokens = x[:, start : start + block]
        assert_bitwise(
            actual=means[:, index],
            expected=subtract_head_mean(tokens, every(tokens))[1][:, 0],
            what=f"mean of block {index}",
        )
        assert_bitwise(
            actual=smoothed[:, start : start + block].contiguous(),
            expected=tokens - means[:, index : index + 1],
            what=f"block {index} less its mean",
        )


@given(x=tensors(NASTY, heads=(2,)), block=blocks, seed=seeds)
@examples(60)
def test_tokens_that_are_not_live_take_no_part(x, block, seed):
    """Zero before and after, and the means are those of the live tokens alone; each head has its
    own. A head or a block without any has mean 0."""
    live = torch.from_numpy(np.random.default_rng(seed).random(x.shape[:2]) < 0.5)
    x = x.masked_fill(~live[..., None], 0)
    smoothed, found = subtract_head_mean(x, live)
    in_blocks, means = subtract_block_means(x, live, block)
    for tensor in (smoothed, in_blocks):
        assert not tensor[~live].any()
    for head in range(2):
        kept = x[head, live[head]][None]
        expected = subtract_head_mean(kept, every(kept))
        assert_bitwise(actual=found[head], expected=expected[1][0], what="mean")
        assert_bitwise(actual=smoothed[head, live[head]], expected=expected[0][0], what="rest")
        for index, start in enumerate(range(0, x.shape[1], block)):
            rows = slice(start, start + block)
            kept = x[head, rows][live[head, rows]][None]
            expected = subtract_head_mean(kept, every(kept))
            assert_bitwise(actual=means[head, index], expected=expected[1][0, 0], what="means")


@pytest.mark.parametrize("n", [1, 2, 64, 130])
def test_a_constant_leaves_nothing(n):
    x = torch.from_numpy(constant(np.random.default_rng(0), (2, n, 8)))
    for smoothed in (subtract_head_mean(x, every(x))[0], subtract_block_means(x, every(x), 64)[0]):
        assert bool((smoothed == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_keep_the_dtype(dtype):
    x = torch.ones(1, 5, 3, dtype=dtype)
    assert subtract_head_mean(x, every(x))[1].dtype is dtype
    assert subtract_block_means(x, every(x), 2)[1].dtype is dtype


@given(x=tensors(MILD, heads=(2,)), gain=st.integers(-40, 40))
@examples(30)
def test_power_of_two_gains_pass_through(x, gain):
    """There is no absolute constant in a mean."""
    one, other = (subtract_head_mean(y, every(x)) for y in (x, x * 2.0**gain))
    for before, after in zip(one, other, strict=True):
        assert_bitwise(actual=after, expected=before * 2.0**gain, what="K and its mean")


def test_the_shift_is_q_dot_mean_times_scale():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 9, 16, generator=g), torch.randn(2, 1, 16, generator=g)
    exact = (q.double() @ k.double().mT).squeeze(-1) * 0.25
    bound = 20 * 2.0**-24 * (q.abs().double() @ k.abs().double().mT).squeeze(-1) * 0.25
    assert_within_bound(actual=logit_shift(q, k, 0.25), exact=exact, bound=bound, what="shift")
