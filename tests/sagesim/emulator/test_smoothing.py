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


def all_valid(x: torch.Tensor) -> torch.Tensor:
    """The mask of a tensor without padding."""
    return torch.ones(1, x.shape[1], dtype=torch.bool)


def mean(tokens: np.ndarray) -> np.ndarray:
    """The mean over the first axis of [n, d], with exact sums and one rounded division."""
    return np.array([math.fsum(map(float, c)) / len(c) for c in tokens.T], np.float64)


@given(x=tensors(NASTY, heads=(2,)))
@examples(60)
def test_the_mean_of_k_is_the_exact_mean_rounded_once(x):
    """Up to the rounding errors of the float64 sum.

    A sum of at most 130 numbers has an error of at most 2**-46 times the sum of absolute values.
    """
    smoothed, found = subtract_head_mean(x, all_valid(x))
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
        what="K minus its mean",
    )


@given(x=tensors(NASTY, heads=(1,)), seed=seeds)
@examples(60)
def test_the_order_of_tokens_does_not_change_the_mean(x, seed):
    """The errors of a float64 sum of float32 numbers of similar size are below float32's."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(x.shape[1]))
    one, other = (
        subtract_head_mean(x, all_valid(x))[1],
        subtract_head_mean(x[:, order], all_valid(x[:, order]))[1],
    )
    assert_bitwise(actual=other, expected=one, what="mean")


@given(x=tensors(NASTY, heads=(2,)), block=blocks)
@examples(60)
def test_block_means_of_q_are_those_of_a_loop_over_blocks(x, block):
    """Each mean is over the tokens of its block, also if the last block is shorter."""
    smoothed, means = subtract_block_means(x, all_valid(x), block)
    n = x.shape[1]
    assert means.shape[1] == math.ceil(n / block)
    for index, start in enumerate(range(0, n, block)):
        tokens = x[:, start : start + block]
        assert_bitwise(
            actual=means[:, index],
            expected=subtract_head_mean(tokens, all_valid(tokens))[1][:, 0],
            what=f"mean of block {index}",
        )
        assert_bitwise(
            actual=smoothed[:, start : start + block].contiguous(),
            expected=tokens - means[:, index : index + 1],
            what=f"block {index} minus its mean",
        )


@given(x=tensors(NASTY, heads=(2,)), block=blocks, seed=seeds)
@examples(60)
def test_padding_stays_zero_and_is_excluded_from_means(x, block, seed):
    """Each head has its own padding. A head or block without valid tokens has mean 0."""
    valid = torch.from_numpy(np.random.default_rng(seed).random(x.shape[:2]) < 0.5)
    x = x.masked_fill(~valid[..., None], 0)
    smoothed, found = subtract_head_mean(x, valid)
    in_blocks, means = subtract_block_means(x, valid, block)
    for tensor in (smoothed, in_blocks):
        assert not tensor[~valid].any()
    for head in range(2):
        tokens = x[head, valid[head]][None]
        expected = subtract_head_mean(tokens, all_valid(tokens))
        assert_bitwise(actual=found[head], expected=expected[1][0], what="mean")
        assert_bitwise(
            actual=smoothed[head, valid[head]], expected=expected[0][0], what="K minus its mean"
        )
        for index, start in enumerate(range(0, x.shape[1], block)):
            rows = slice(start, start + block)
            tokens = x[head, rows][valid[head, rows]][None]
            expected = subtract_head_mean(tokens, all_valid(tokens))
            assert_bitwise(actual=means[head, index], expected=expected[1][0, 0], what="means")


@pytest.mark.parametrize("n", [1, 2, 64, 130])
def test_constant_tokens_become_zero(n):
    x = torch.from_numpy(constant(np.random.default_rng(0), (2, n, 8)))
    for smoothed in (
        subtract_head_mean(x, all_valid(x))[0],
        subtract_block_means(x, all_valid(x), 64)[0],
    ):
        assert bool((smoothed == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_keep_the_dtype(dtype):
    x = torch.ones(1, 5, 3, dtype=dtype)
    assert subtract_head_mean(x, all_valid(x))[1].dtype is dtype
    assert subtract_block_means(x, all_valid(x), 2)[1].dtype is dtype


@given(x=tensors(MILD, heads=(2,)), gain=st.integers(-40, 40))
@examples(30)
def test_a_power_of_two_times_k_multiplies_results_exactly(x, gain):
    """A mean has no epsilon."""
    one, other = (subtract_head_mean(y, all_valid(x)) for y in (x, x * 2.0**gain))
    for before, after in zip(one, other, strict=True):
        assert_bitwise(actual=after, expected=before * 2.0**gain, what="K and its mean")


def test_the_shift_is_q_dot_mean_times_scale():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 9, 16, generator=g), torch.randn(2, 1, 16, generator=g)
    exact = (q.double() @ k.double().mT).squeeze(-1) * 0.25
    bound = 20 * 2.0**-24 * (q.abs().double() @ k.abs().double().mT).squeeze(-1) * 0.25
    assert_within_bound(actual=logit_shift(q, k, 0.25), exact=exact, bound=bound, what="shift")
