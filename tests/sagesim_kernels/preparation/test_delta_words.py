"""The numbers of 16 bit that the backward for Hopper adds to dP in place of delta."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim_kernels.operands import LAUNCH
from sagesim_kernels.preparation.query_rows import store_delta_words
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

COUNT = 1024
LARGEST = torch.finfo(torch.float32).max


@triton.jit
def words_kernel(words, delta, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    store_delta_words(words + at * 4, tl.load(delta + at))


def parts_of(delta: Tensor) -> Tensor:
    """The numbers that are added for each delta, float64 [delta, 8]."""
    padded = torch.zeros(COUNT, device=DEVICE)
    padded[: delta.numel()] = delta
    words = torch.full((COUNT, 4), -1, dtype=torch.int32, device=DEVICE)
    words_kernel[(1,)](words, padded, COUNT, **LAUNCH)
    return words.view(torch.bfloat16).double()[: delta.numel()]


def test_parts_of_any_finite_delta_are_finite_and_sum_to_its_negative() -> None:
    """Where all 24 bits are far from the smallest float32."""
    mantissas = torch.randint(2**23, 2**24, (900,), generator=torch.Generator().manual_seed(0))
    exponents = torch.arange(900) % 200 - 103
    signs = torch.where(torch.arange(900) % 3 == 0, -1.0, 1.0)
    random = signs * torch.ldexp(mantissas.float(), exponents)
    edges = torch.tensor([0.0, 1.0, -1.0, 2**24 - 1, 1 + 2**-23, LARGEST, -LARGEST, 2.0**-100])
    delta = torch.cat((random, edges)).to(DEVICE)
    parts = parts_of(delta)
    assert parts.isfinite().all()
    assert torch.equal(parts.sum(1), -delta.double())


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_one_part(value: float) -> None:
    (parts,) = parts_of(torch.tensor([value], device=DEVICE)).tolist()
    assert parts == [-value, 0, 0, 0, 0, 0, 0, 0]


def test_every_nan_stays_one() -> None:
    """Also one whose upper half is that of infinity. It is one part."""
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)
    parts = parts_of(bits.view(torch.float32).to(DEVICE))
    assert parts[:, 0].isnan().all() and not parts[:, 1:].any()
