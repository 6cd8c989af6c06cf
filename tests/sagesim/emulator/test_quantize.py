import math
import re

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sagesim import HALF_AWAY, HALF_EVEN, Granularity, Precision, Rounding, quantize
from sagesim.emulator import CODE_MAX
from sagesim.emulator.quantization import (
    encode,
    encode_p_per_tile_row_,
    from_tiles,
    scales,
    to_tiles,
)
from tests.support import examples
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.inputs import EXTREME, MILD, half_integer_ties
from tests.support.region_quantizer import quantize_matrix, regions
from tests.support.strategies import (
    MAP_GRANULARITIES,
    SCALED,
    TOKEN_GRANULARITIES,
    blocks,
    roundings,
    seeds,
    tensors,
)

U = 2.0**-24
OF_ELEMENTS = TOKEN_GRANULARITIES + MAP_GRANULARITIES
"""The granularities whose scales follow from the elements."""

granularities = st.sampled_from(OF_ELEMENTS)


def block_of(granularity: Granularity, rows: int, columns: int) -> int | tuple[int, int]:
    return (rows, columns) if granularity.is_map else rows


def spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The scale of every element."""
    return scale.expand(like.shape).contiguous()


def divide(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by in float32, correctly rounded by numpy."""
    return torch.from_numpy(x.numpy() / np.float32(by))


class TestAgainstTheDefinition:
    @pytest.mark.parametrize("granularity", OF_ELEMENTS)
    @given(x=tensors(EXTREME, heads=(2,)), rows=blocks, columns=blocks)
    @examples(12)
    def test_codes_and_scales_are_those_of_a_loop_over_regions(self, granularity, x, rows, columns):
        block = block_of(granularity, rows, columns)
        found = quantize(x, granularity, block=block)
        assert found.codes.dtype is torch.int8 and found.scale.dtype is torch.float32
        for head in range(x.shape[0]):
            codes, scales = quantize_matrix(x[head].numpy(), granularity.value, block)
            assert_bitwise(actual=found.codes[head], expected=torch.from_numpy(codes), what="codes")
            assert_bitwise(
                actual=spread(found.scale, x)[head],
                expected=torch.from_numpy(scales),
                what="scales",
            )

    @pytest.mark.parametrize("granularity", OF_ELEMENTS)
    def test_regions_partition_the_matrix(self, granularity):
        """In the independent implementation, each element lies in exactly one region."""
        count = np.zeros((130, 72), int)
        for rows, columns in regions(130, 72, granularity.value, block_of(granularity, 64, 7)):
            count[rows, columns] += 1
        assert (count == 1).all()

    def test_the_number_of_scales_of_each_granularity(self):
        """130 x 72 in blocks of 64 rows and 7 columns: 3 row blocks, 11 column blocks."""
        counts = {
            "head": 1,
            "block": 3,
            "token": 130,
            "channel": 72,
            "block_channel": 3 * 72,
            "tile": 3 * 11,
            "tile_row": 130 * 11,
            "tile_column": 3 * 72,
            "row": 130,
        }
        x = torch.randn(1, 130, 72, generator=torch.Generator().manual_seed(0))
        for granularity in OF_ELEMENTS:
            scale = spread(quantize(x, granularity, block=block_of(granularity, 64, 7)).scale, x)
            assert scale.unique().numel() == counts[granularity.value], granularity

    @pytest.mark.parametrize("precision", SCALED)
    @given(seed=seeds, exponent=st.integers(-120, 120))
    @examples(20)
    def test_scale_and_inverse_are_one_rounded_division_each(self, precision, seed, exponent):
        """They equal numpy's float32 division, which is correctly rounded.

        Multiplying a reciprocal by the largest code differs from it for a quarter of all amax.
        """
        rng = np.random.default_rng(seed)
        amax = (rng.random(1000, np.float32) + np.float32(0.5)) * np.float32(2.0**exponent)
        top = np.float32(CODE_MAX[precision])
        with np.errstate(over="ignore"):
            inverse = top / amax
        finite = ~np.isinf(inverse)
        scale, found = scales(torch.from_numpy(amax), CODE_MAX[precision])
        expected = np.where(finite, amax / top, np.float32(1))
        assert_bitwise(actual=scale, expected=torch.from_numpy(expected), what="scale")
        expected = np.where(finite, inverse, np.float32(0))
        assert_bitwise(actual=found, expected=torch.from_numpy(expected), what="inverse")


class TestHalfScaleBound:
    @given(
        x=tensors(EXTREME),
        granularity=granularities,
        rows=blocks,
        columns=blocks,
        rounding=st.sampled_from([HALF_EVEN, HALF_AWAY]),
    )
    @examples(150)
    def test_x_is_within_half_a_scale(self, x, granularity, rows, columns, rounding):
        """|x - codes * scale| <= scale / 2, plus float32's rounding errors.

        inverse, x * inverse and scale are rounded once each, by at most u relatively. x * inverse
        therefore lies within 3 u |x / scale| <= 3 u 127 of x / scale; the factor 1.001 covers terms
        of second order. A subnormal scale has an error of up to 2**-150, which codes multiply by up
        to 127. If 127 / amax overflows, codes are 0, the scale is 1, and |x| is below 3.8e-37.
        """
        q = quantize(x, granularity, block=block_of(granularity, rows, columns), rounding=rounding)
        scale = spread(q.scale, x).double()
        rounding_error = 1.001 * 3 * U * 127 * scale + 127 * 2.0**-150
        assert_within_bound(
            actual=q.codes.double() * scale,
            exact=x.double(),
            bound=scale / 2 + rounding_error,
            what="dequantized",
        )

    @given(x=tensors(MILD), granularity=granularities, rows=blocks, columns=blocks, seed=seeds)
    @examples(50)
    def test_stochastic_rounding_is_within_one_scale(self, x, granularity, rows, columns, seed):
        rounding = Rounding.stochastic(seed)
        q = quantize(x, granularity, block=block_of(granularity, rows, columns), rounding=rounding)
        scale = spread(q.scale, x).double()
        assert_within_bound(
            actual=q.codes.double() * scale,
            exact=x.double(),
            bound=scale * (1 + 1.001 * 3 * U * 127),
            what="dequantized",
        )

    def test_the_bound_is_tight(self):
        x = torch.tensor([[127.0, 0.5]])
        q = quantize(x, Granularity.PerToken)
        assert (x - q.dequantize())[0, 1] == q.scale[0, 0] / 2

    @given(x=tensors(EXTREME), granularity=granularities, precision=st.sampled_from(SCALED))
    @examples(50)
    def test_dequantize_is_codes_times_scale_in_float32(self, x, granularity, precision):
        q = quantize(x, granularity, block=block_of(granularity, 16, 16), precision=precision)
        expected = q.codes.float().numpy() * q.scale.numpy()
        assert_bitwise(
            actual=q.dequantize(), expected=torch.from_numpy(expected), what="dequantized"
        )


class TestSymmetries:
    @given(
        x=tensors(MILD),
        granularity=granularities,
        precision=st.sampled_from(SCALED),
        rounding=roundings,
        exponent=st.integers(-60, 60),
    )
    @examples(100)
    def test_a_power_of_two_multiplies_scales_and_leaves_codes(
        self, x, granularity, precision, rounding, exponent
    ):
        """This is exact unless a number becomes subnormal, because there is no epsilon."""
        gain = 2.0**exponent
        call = {
            "block": block_of(granularity, 16, 16),
            "precision": precision,
            "rounding": rounding,
        }
        one, other = quantize(x, granularity, **call), quantize(x * gain, granularity, **call)
        assert_bitwise(actual=other.codes, expected=one.codes, what="codes")
        zero = spread(one.codes.float() == 0, x)  # regions of zeros have scale 1 for any gain
        scaled = spread(one.scale, x) * gain
        differs = spread(other.scale, x) != scaled
        assert bool((zero | ~differs).all())

    @given(
        x=tensors(EXTREME),
        granularity=granularities,
        precision=st.sampled_from(SCALED),
        rounding=st.sampled_from([HALF_EVEN, HALF_AWAY]),
    )
    @examples(80)
    def test_a_sign_flips_codes_and_leaves_scales(self, x, granularity, precision, rounding):
        call = {
            "block": block_of(granularity, 16, 16),
            "precision": precision,
            "rounding": rounding,
        }
        one, other = quantize(x, granularity, **call), quantize(-x, granularity, **call)
        assert torch.equal(other.codes.float(), -one.codes.float())
        assert_bitwise(actual=other.scale, expected=one.scale, what="scale")

    @given(
        x=tensors(EXTREME),
        granularity=granularities,
        rows=blocks,
        columns=blocks,
        rounding=roundings,
    )
    @examples(100)
    def test_minus_128_never_appears_and_some_element_has_the_largest_code(
        self, x, granularity, rows, columns, rounding
    ):
        block = block_of(granularity, rows, columns)
        codes = quantize(x, granularity, block=block, rounding=rounding).codes
        assert codes.min() >= -127
        for head in range(x.shape[0]):
            for region in regions(*x.shape[1:], granularity.value, block):
                top = codes[head][region].int().abs().max()
                amax = x[head][region].abs().max().item()
                assert top == (127 if amax > 1e-36 else 0)


class TestEdges:
    @pytest.mark.parametrize("precision", SCALED)
    @pytest.mark.parametrize("granularity", OF_ELEMENTS)
    @pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, 1e-40, 1e-38])
    def test_regions_too_small_to_divide_by_have_codes_0_and_scale_1(
        self, precision, granularity, value
    ):
        x = torch.full((5, 6), value)
        q = quantize(x, granularity, block=block_of(granularity, 2, 4), precision=precision)
        assert bool((q.codes.float() == 0).all()) and bool((q.scale == 1).all())

    @pytest.mark.parametrize("precision", SCALED)
    def test_codes_vanish_exactly_if_the_inverse_overflows(self, precision):
        top = CODE_MAX[precision]
        overflow = float(np.finfo(np.float32).max)
        amax = np.float32(top / overflow)
        for _ in range(4):  # start a few float32 numbers below the threshold
            amax = np.nextafter(amax, np.float32(0))
        seen = set()
        for _ in range(8):
            with np.errstate(over="ignore"):
                vanishes = bool(np.isinf(np.float32(top) / amax))
            q = quantize(torch.tensor([[float(amax)]]), Granularity.PerHead, precision=precision)
            assert q.codes.float().item() == (0 if vanishes else top)
            assert q.scale.item() == (1 if vanishes else float(amax / np.float32(top)))
            seen.add(vanishes)
            amax = np.nextafter(amax, np.float32(1))
        assert seen == {True, False}

    def test_one_element(self):
        q = quantize(torch.tensor([[-3.0]]), Granularity.PerBlock)
        assert q.codes.item() == -127 and q.scale.item() == np.float32(3) / np.float32(127)

    def test_a_zero_region_beside_a_large_one(self):
        x = torch.zeros(4, 2)
        x[2:] = 6e4
        q = quantize(x, Granularity.PerBlock, block=2)
        assert q.codes.tolist() == [[0, 0], [0, 0], [127, 127], [127, 127]]
        assert q.scale[:2].unique().item() == 1

    @pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY])
    @pytest.mark.parametrize("granularity", [Granularity.PerToken, Granularity.PerBlock])
    def test_ties_are_exact(self, rounding, granularity):
        """The scale is 1, so that every element but the largest is a tie."""
        rng = np.random.default_rng(0)
        x = torch.from_numpy(half_integer_ties(rng, (64, 40)))
        q = quantize(x, granularity, rounding=rounding)
        assert bool((q.scale == 1).all())
        ties = x.abs() != 127
        assert bool(ties.any())
        codes = q.codes.float()
        if rounding is HALF_EVEN:
            assert bool((codes[ties] % 2 == 0).all())
        else:
            assert torch.equal(codes[ties].abs(), x[ties].abs() + 0.5)


class TestPadding:
    @given(
        x=tensors(MILD),
        granularity=granularities,
        precision=st.sampled_from(SCALED),
        rounding=roundings,
    )
    @examples(80)
    def test_a_tail_is_a_block_padded_with_zeros_by_hand(self, x, granularity, precision, rounding):
        call = {
            "block": block_of(granularity, 64, 64),
            "precision": precision,
            "rounding": rounding,
        }
        n, d = x.shape[1:]
        pad_d = -d % 64 if granularity.is_map else 0
        padded = torch.nn.functional.pad(x, (0, pad_d, 0, -n % 64))
        tail, whole = quantize(x, granularity, **call), quantize(padded, granularity, **call)
        assert torch.equal(whole.codes.float()[:, :n, :d], tail.codes.float())
        assert_bitwise(
            actual=spread(whole.scale, padded)[:, :n, :d].contiguous(),
            expected=spread(tail.scale, x),
            what="scale",
        )

    @given(x=tensors(MILD), rows=blocks, columns=blocks)
    @examples(40)
    def test_from_tiles_inverts_to_tiles(self, x, rows, columns):
        tiles = to_tiles(x, rows, columns)
        assert tiles.shape[-3] == rows and tiles.shape[-1] == columns
        assert_bitwise(
            actual=from_tiles(tiles, *x.shape[1:]).contiguous(), expected=x, what="tiles"
        )
        assert tiles.count_nonzero() == x.count_nonzero()


CALL = {"granularity": granularities, "precision": st.sampled_from(SCALED), "rounding": roundings}


class TestIndependence:
    @given(x=tensors(MILD, heads=(3,)), **CALL)
    @examples(50)
    def test_a_head_has_the_same_codes_alone_and_in_a_batch(
        self, x, granularity, precision, rounding
    ):
        call = {
            "block": block_of(granularity, 16, 16),
            "precision": precision,
            "rounding": rounding,
        }
        together = quantize(x, granularity, **call)
        for head in range(3):
            alone = quantize(x[head], granularity, **call)
            assert_bitwise(actual=alone.codes, expected=together.codes[head], what="codes")
            assert_bitwise(actual=alone.scale, expected=together.scale[head], what="scale")

    @pytest.mark.parametrize(
        "granularity", [g for g in OF_ELEMENTS if g.value not in ("head", "channel", "row")]
    )
    @given(x=tensors(MILD), rounding=roundings, longer=st.integers(1, 40))
    @examples(12)
    def test_more_tokens_do_not_change_codes_of_earlier_blocks(
        self, granularity, x, rounding, longer
    ):
        """This includes stochastic rounding, where an element's random number is the same."""
        n = x.shape[1] // 16 * 16
        assume(n)
        call = {"block": block_of(granularity, 16, 16), "rounding": rounding}
        extended = torch.cat([x[:, :n], 100 * x[:, :1].expand(-1, longer, -1)], 1)
        short, long = (
            quantize(x[:, :n], granularity, **call),
            quantize(extended, granularity, **call),
        )
        assert_bitwise(actual=long.codes[:, :n].contiguous(), expected=short.codes, what="codes")

    @given(x=tensors(MILD, heads=(2,)), **CALL)
    @examples(50)
    def test_strides_do_not_matter_and_x_is_not_changed(self, x, granularity, precision, rounding):
        call = {
            "block": block_of(granularity, 16, 16),
            "precision": precision,
            "rounding": rounding,
        }
        expected = quantize(x, granularity, **call)
        before = x.clone()
        for strided in (
            x.mT.contiguous().mT,
            x.transpose(0, 1).contiguous().transpose(0, 1),
            torch.nn.functional.pad(x, (1, 2, 3, 0))[:, 3:, 1:-2],
        ):
            found = quantize(strided, granularity, **call)
            assert_bitwise(actual=found.codes, expected=expected.codes, what="codes")
            assert_bitwise(actual=found.scale, expected=expected.scale, what="scale")
        assert_bitwise(actual=x, expected=before, what="x")

    @pytest.mark.parametrize("granularity", TOKEN_GRANULARITIES)
    def test_expanded_tensors_give_the_same_bytes(self, granularity):
        x = torch.linspace(-3, 3, 40).expand(2, 33, 40)
        found, expected = (
            quantize(x, granularity, block=16),
            quantize(x.contiguous(), granularity, block=16),
        )
        assert_bitwise(actual=found.codes, expected=expected.codes, what="codes")
        assert_bitwise(actual=found.scale, expected=expected.scale, what="scale")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_dtypes_are_computed_in_float32(self, dtype):
        x = torch.randn(70, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        found, expected = (quantize(y, Granularity.PerBlock) for y in (x, x.float()))
        assert_bitwise(actual=found.codes, expected=expected.codes, what="codes")
        assert_bitwise(actual=found.scale, expected=expected.scale, what="scale")


class TestPPerTileRow:
    """The forward rounds P with one scale per tile row from exp(S - tile row max)."""

    @given(seed=seeds, precision=st.sampled_from(SCALED), rounding=roundings)
    @examples(40)
    def test_codes_depend_on_the_tile_alone(self, seed, precision, rounding):
        s = torch.randn(1, 1, 8, 3, 16, generator=torch.Generator().manual_seed(seed)) * 4
        e = torch.exp(s - s.amax(-1, keepdim=True))
        weight = torch.exp(s.amax(-1, keepdim=True) - s.amax((-1, -2), keepdim=True))
        top = CODE_MAX[precision]
        masked = torch.zeros_like(weight, dtype=torch.bool)
        one = encode_p_per_tile_row_(e.clone(), weight, masked, precision, rounding, 0)
        other = encode_p_per_tile_row_(e.clone(), weight / 2, masked, precision, rounding, 0)
        assert_bitwise(actual=one.values, expected=other.values, what="codes")
        assert bool((one.values.amax(-1) == top).all()), "the row's maximum maps to the top code"
        assert one.scale is not None
        assert_bitwise(actual=one.scale, expected=divide(weight, top), what="scale")

    @pytest.mark.parametrize("precision", SCALED)
    def test_a_fully_masked_tile_row_has_codes_0_and_scale_1(self, precision):
        e, weight = torch.zeros(1, 1, 2, 1, 4), torch.zeros(1, 1, 2, 1, 1)
        e[:, :, 0], weight[:, :, 0] = 1, 0.5
        p = encode_p_per_tile_row_(e, weight, weight == 0, precision, HALF_EVEN, 0)
        top = CODE_MAX[precision]
        assert p.scale is not None
        assert p.values[0, 0, :, 0].tolist() == [[top] * 4, [0] * 4]
        assert p.scale.flatten().tolist() == [np.float32(0.5) / np.float32(top), 1]

    def test_agrees_with_encode_if_the_weights_are_1(self):
        """amax is then 1 in every tile row, so that `encode` also has the exact inverse 127."""
        e = torch.rand(1, 1, 8, 2, 16, generator=torch.Generator().manual_seed(4))
        e[..., 3] = 1
        weight = torch.ones(1, 1, 8, 2, 1)
        general = encode(e, Precision.INT8, Granularity.PerTileRow, HALF_EVEN, "p")
        int8 = Precision.INT8
        found = encode_p_per_tile_row_(e.clone(), weight, weight == 0, int8, HALF_EVEN, 0)
        assert_bitwise(actual=found.values, expected=general.values, what="codes")
        assert found.scale is not None and general.scale is not None
        assert_bitwise(actual=found.scale, expected=general.scale, what="scale")


class TestInvalidArguments:
    @pytest.mark.parametrize("shape", [(), (3,), (0, 4), (4, 0)])
    def test_shapes_without_two_axes_or_elements(self, as_installed, shape):
        with pytest.raises(ValueError, match=r"\[\.\.\., n, d\].*" + re.escape(str(shape))):
            quantize(torch.ones(shape), Granularity.PerHead)

    @pytest.mark.parametrize("precision", [p for p in Precision if p not in SCALED])
    def test_precisions_without_a_scale(self, precision):
        with pytest.raises(ValueError, match=f"'{precision.value}' has no scale"):
            quantize(torch.ones(2, 2), Granularity.PerHead, precision=precision)

    @pytest.mark.parametrize("granularity", MAP_GRANULARITIES)
    def test_a_map_needs_two_block_sizes(self, granularity):
        with pytest.raises(
            ValueError, match=f"'{granularity.value}' takes block=\\(block_q, block_k\\)"
        ):
            quantize(torch.ones(2, 2), granularity, block=2)

    @pytest.mark.parametrize("granularity", TOKEN_GRANULARITIES)
    def test_tokens_need_one_block_size(self, granularity):
        with pytest.raises(
            ValueError, match=f"'{granularity.value}' takes block=a number of tokens"
        ):
            quantize(torch.ones(2, 2), granularity, block=(2, 2))

    @pytest.mark.parametrize("block", [0, -1])
    def test_block_sizes_that_are_not_positive(self, block):
        with pytest.raises(ValueError, match=f"{block}"):
            quantize(torch.ones(2, 2), Granularity.PerBlock, block=block)
        with pytest.raises(ValueError, match=f"{block}"):
            quantize(torch.ones(2, 2), Granularity.PerTile, block=(2, block))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_nan_and_infinity(self, bad):
        with pytest.raises(ValueError, match="finite"):
            quantize(torch.tensor([[1.0, bad]]), Granularity.PerHead)

    def test_float64_numbers_beyond_float32(self):
        with pytest.raises(ValueError, match=r"x of shape \(1, 2\) is not finite in float32"):
            quantize(torch.tensor([[1.0, 1e300]]).double() * 1e10, Granularity.PerHead)

    @pytest.mark.parametrize(
        ("x", "given", "error", "words"),
        [
            (torch.ones(2, 2).int(), {}, TypeError, "x is torch.int32; it must have a floating"),
            (np.ones((2, 2)), {}, TypeError, "x is a numpy.ndarray; it must be a torch.Tensor"),
            (torch.ones(2, 2), {"precision": "int8"}, TypeError, "precision is 'int8'"),
            (torch.ones(2, 2), {"rounding": "half_even"}, TypeError, "rounding is 'half_even'"),
            (torch.ones(2, 2), {"tensor": "x"}, ValueError, "tensor is 'x'; it must be one of q,"),
            (torch.ones(2, 2), {"block": 4.5}, ValueError, "takes block=a number of tokens; got 4"),
        ],
    )
    def test_other_types_and_names(self, as_installed, x, given, error, words):
        with pytest.raises(error, match=words):
            quantize(x, Granularity.PerBlock, **given)

    @pytest.mark.parametrize("block", [(4,), (4, 4, 4), (4, 4.5), (4, "4")])
    def test_a_pair_of_block_sizes_that_is_none(self, as_installed, block):
        with pytest.raises(ValueError, match=r"takes block=\(block_q, block_k\); got \(4,"):
            quantize(torch.ones(2, 2), Granularity.PerTile, block=block)


@pytest.mark.parametrize("precision", SCALED)
@pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY, Rounding.stochastic(1)])
def test_no_gradient_passes_through_the_codes(precision, rounding):
    """It would be that of the scale alone."""
    x = torch.ones(2, 3, requires_grad=True)
    q = quantize(x, Granularity.PerToken, precision=precision, rounding=rounding)
    assert not (q.codes.requires_grad or q.scale.requires_grad or q.dequantize().requires_grad)
