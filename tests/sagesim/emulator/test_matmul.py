"""Products of operands in tiles agree with int64 sums of codes and float64 products."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sagesim import HALF_EVEN, Granularity, Precision
from sagesim.emulator import Operand, encode, from_tiles, to_tiles
from sagesim.emulator.matmul import map_by_tokens, map_transposed_by_tokens, tokens_by_tokens
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.strategies import MAP_GRANULARITIES, TOKEN_GRANULARITIES, seeds

U = 2.0**-24
BLOCK_Q, BLOCK_K = 16, 24
FORMS = ("tokens", "map", "map_transposed")


def codes(rng: np.random.Generator, shape: tuple[int, ...], *, extreme: bool) -> Tensor:
    """INT8 codes as float32; extreme ones are all 127 or -127."""
    if extreme:
        return torch.from_numpy(rng.choice([-127, 127], shape).astype(np.float32))
    return torch.from_numpy(rng.integers(-127, 128, shape).astype(np.float32))


def int8(values: Tensor, rows: int, columns: int) -> Operand:
    """An operand of these codes with scale 1."""
    return Operand(to_tiles(values, rows, columns), torch.ones(1, 1, 1, 1, 1), Precision.INT8)


def as_int32_would(total: Tensor) -> Tensor:
    """An exact int64 sum, rounded to float32 once, as an INT32 accumulator is."""
    assert total.abs().max() < 2**31
    return total.float()


def product(form: str, left: Operand, right: Operand, n_q: int, n_k: int) -> Tensor:
    match form:
        case "tokens":
            return from_tiles(tokens_by_tokens(left, right), n_q, n_k)
        case "map":
            return map_by_tokens(left, right)[:, :n_q]
        case _:
            return map_transposed_by_tokens(left, right)[:, :n_k]


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("contracted", [1, 2, 64, 1040, 1041, 1500, 3000])
@pytest.mark.parametrize("form", FORMS)
def test_sums_of_int8_codes_are_exact(form, contracted, extreme):
    """One tile along the contracted axis: its INT32 sum is rounded to float32 once.

    127**2 * 1040 is the largest sum of extreme codes that float32 represents exactly.
    """
    rng = np.random.default_rng(contracted)
    if form == "tokens":
        left, right = (codes(rng, (2, n, contracted), extreme=extreme) for n in (5, 7))
        if extreme:
            right[:, 0] = left[:, 0]  # the largest possible sum
        total = left.long() @ right.long().mT
        found = tokens_by_tokens(int8(left, 5, contracted), int8(right, 7, contracted))
        found = from_tiles(found, 5, 7)
    else:
        n = contracted
        left, right = codes(rng, (2, 5, n), extreme=extreme), codes(rng, (2, n, 3), extreme=extreme)
        if extreme:
            right[:, :, 0] = left[:, 0]
        total = left.long() @ right.long()
        if form == "map":
            found = map_by_tokens(int8(left, 5, n), int8(right, n, 3))
        else:
            found = map_transposed_by_tokens(int8(left.mT.contiguous(), n, 5), int8(right, n, 3))
    assert_bitwise(actual=found, expected=as_int32_would(total), what=form)
    if extreme:
        assert total.max() == 127**2 * contracted


@pytest.mark.parametrize("form", ["map", "map_transposed"])
def test_tiles_are_summed_each_on_its_own_then_added_in_float32(form):
    """The scales are powers of two, so every float32 operation is exact.

    The result is the int64 sum of scaled integers in any order.
    """
    rng = np.random.default_rng(0)
    left, right = codes(rng, (1, 64, 96), extreme=False), codes(rng, (1, 96, 8), extreme=False)
    if form == "map_transposed":
        left = left.mT.contiguous()
    blocks = 96 // BLOCK_K if form == "map" else 96 // BLOCK_Q
    size = 96 // blocks
    powers = 2 ** torch.arange(blocks)
    scale = powers.float().view(1, blocks, 1, 1, 1)
    lhs = int8(left, BLOCK_Q, BLOCK_K)
    rhs = Operand(to_tiles(right, size, 8), scale, Precision.INT8)
    weights = powers.repeat_interleave(size)[:, None]
    lhs_matrix = left if form == "map" else left.mT
    expected = lhs_matrix.long() @ (right.long() * weights)
    assert expected.abs().max() < 2**24
    found = product(form, lhs, rhs, 64 if form == "map" else 96, 64)
    assert_bitwise(actual=found, expected=expected.float(), what=form)


class TestAnyPrecisionAndGranularity:
    """The product is that of the dequantized operands, up to float32's rounding."""

    N_Q, N_K, D = 37, 53, 20  # the last block of queries and of keys is shorter

    def check(self, form: str, left: Operand, right: Operand, dense: tuple[Tensor, Tensor]):
        left_hat, right_hat = (x.double() for x in dense)
        match form:
            case "tokens":
                right_hat = right_hat.mT
            case "map_transposed":
                left_hat = left_hat.mT
        terms = left_hat.shape[-1]
        # A sum of `terms` products in any order, and two multiplications by a scale.
        bound = 1.001 * (terms + 4) * U * (left_hat.abs() @ right_hat.abs())
        assert_within_bound(
            actual=product(form, left, right, self.N_Q, self.N_K),
            exact=left_hat @ right_hat,
            bound=bound,
            what=form,
        )

    def dense(self, operand: Operand, n: int, m: int) -> Tensor:
        scale = 1.0 if operand.scale is None else operand.scale.double()
        return from_tiles((operand.values.double() * scale), n, m)

    @pytest.mark.parametrize("form", FORMS)
    @given(data=st.data(), seed=seeds)
    @examples(60)
    def test_agrees_with_float64(self, form, data, seed):
        precisions = st.sampled_from([p for p in Precision if p is not Precision.INPUT16])
        precision = data.draw(precisions)
        of_lhs = TOKEN_GRANULARITIES if form == "tokens" else MAP_GRANULARITIES
        lhs_granularity = data.draw(st.sampled_from(of_lhs))
        rhs_granularity = data.draw(st.sampled_from(TOKEN_GRANULARITIES))
        rng = np.random.default_rng(seed)
        gain = np.exp2(rng.integers(-6, 6, (2, self.N_Q, 1))).astype(np.float32)
        q = torch.from_numpy(rng.standard_normal((2, self.N_Q, self.D), np.float32) * gain)
        k = torch.from_numpy(rng.standard_normal((2, self.N_K, self.D), np.float32))
        p = torch.from_numpy(rng.random((2, self.N_Q, self.N_K), np.float32) * gain)

        def tokens(x: Tensor, block: int, granularity: Granularity) -> Operand:
            return encode(to_tiles(x, block, self.D), precision, granularity, HALF_EVEN, "q")

        tokens_q, tokens_k = (
            tokens(q, BLOCK_Q, rhs_granularity),
            tokens(k, BLOCK_K, rhs_granularity),
        )
        if form == "tokens":
            lhs = tokens(q, BLOCK_Q, lhs_granularity)
            dense = self.dense(lhs, self.N_Q, self.D), self.dense(tokens_k, self.N_K, self.D)
            self.check(form, lhs, tokens_k, dense)
            return
        lhs = encode(to_tiles(p, BLOCK_Q, BLOCK_K), precision, lhs_granularity, HALF_EVEN, "p")
        rhs, n = (tokens_k, self.N_K) if form == "map" else (tokens_q, self.N_Q)
        dense = self.dense(lhs, self.N_Q, self.N_K), self.dense(rhs, n, self.D)
        self.check(form, lhs, rhs, dense)


@pytest.mark.parametrize("form", ["map", "map_transposed"])
def test_swapped_scales_of_two_tiles_are_found(form):
    """The comparison above rejects this bug."""
    rng = np.random.default_rng(3)
    values = codes(rng, (1, 32, 48), extreme=False)
    right = codes(rng, (1, 48 if form == "map" else 32, 8), extreme=False)
    block = BLOCK_K if form == "map" else BLOCK_Q
    scale = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1)
    lhs = int8(values, BLOCK_Q, BLOCK_K)
    right_tiles = to_tiles(right, block, 8)
    good, bad = (
        product(form, lhs, Operand(right_tiles, s, Precision.INT8), 32, 48)
        for s in (scale, scale.flip(1))
    )
    weights = torch.tensor([1, 3]).repeat_interleave(block)[:, None]
    lhs_matrix = values if form == "map" else values.mT
    expected = (lhs_matrix.long() @ (right.long() * weights)).float()
    assert_bitwise(actual=good, expected=expected, what=form)
    with pytest.raises(AssertionError, match="differ in bits"):
        assert_bitwise(actual=bad, expected=expected, what=form)


def scaled(form: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The product of codes with scales of one token each, and the same in float64.

    left, right: float32 scales [4] and [3], of the tokens of both operands; in form "map" and
        "map_transposed" those of the right operand belong to tiles of one key or one query.
    """
    rng = np.random.default_rng(2)
    columns = 16 if form == "tokens" else 3
    a, b = codes(rng, (1, 4, columns), extreme=False), codes(rng, (1, 3, 16), extreme=False)
    exact_a, exact_b = a.double() * left.double()[:, None], b.double() * right.double()[:, None]
    rhs = Operand(to_tiles(b, 1, 16), right.view(1, 3, 1, 1, 1), Precision.INT8)
    if form == "tokens":
        lhs = Operand(to_tiles(a, 1, 16), left.view(1, 4, 1, 1, 1), Precision.INT8)
        return product(form, lhs, rhs, 4, 3), exact_a @ exact_b.mT
    if form == "map":
        lhs = Operand(to_tiles(a, 1, 1), left.view(1, 4, 1, 1, 1), Precision.INT8)
        return product(form, lhs, rhs, 4, 0), exact_a @ exact_b
    lhs = Operand(to_tiles(a.mT.contiguous(), 1, 1), left.view(1, 1, 1, 4, 1), Precision.INT8)
    return product(form, lhs, rhs, 0, 4), exact_a @ exact_b


@pytest.mark.parametrize("form", FORMS)
def test_extreme_scales_neither_overflow_nor_vanish_if_the_result_does_not(form):
    """A row with a large scale stands beside one with a small scale, as tokens of a head may do."""
    left = torch.tensor([2.0**-110, 1.5 * 2.0**-60, 1.0, 2.0**118])
    for right in (2.0**118, 1.7 * 2.0**-20, 2.0**-115):
        found, exact = scaled(form, left, torch.tensor([right, 0.75 * right, right]))
        largest = exact.abs().amax((0, 2))
        rows = (largest > 2.0**-120) & (largest < 2.0**127)  # the others may over- or underflow
        bound = 8 * U * largest[rows][None, :, None]
        assert_within_bound(actual=found[:, rows], exact=exact[:, rows], bound=bound, what=form)
        assert int(rows.sum()) >= 2


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_changes_no_bit_of_another_tokens_result(form):
    left = torch.tensor([1.3, 2.0**-30, 0.1, 1.0])
    right = torch.tensor([0.7, 1.1, 0.3])
    moderate, _ = scaled(form, left, right)
    left[3] = 2.0**100
    extreme, _ = scaled(form, left, right)
    assert_bitwise(actual=extreme[:, :3], expected=moderate[:, :3], what=form)


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.INPUT16])
def test_float64_stays_float64(precision):
    """FP32 sites do not round float64 numbers, as gradcheck requires."""
    rng = np.random.default_rng(1)
    q, k = (torch.from_numpy(rng.standard_normal((1, n, 8))) for n in (9, 11))
    operands = [
        encode(to_tiles(x, 16, 8), precision, Granularity.PerToken, HALF_EVEN, "q") for x in (q, k)
    ]
    found = from_tiles(tokens_by_tokens(*operands), 9, 11)
    assert found.dtype is torch.float64
    if precision is Precision.FP32:
        assert_within_bound(
            actual=found,
            exact=q @ k.mT,
            bound=9 * 2.0**-53 * (q.abs() @ k.abs().mT),
            what="q k^T",
        )
