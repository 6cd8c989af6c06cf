"""The tanh of a softcap: its error, its limits, and the derivation of its coefficients."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sagesim_kernels.interpreter import IS_INTERPRETED
from sagesim_kernels.operands import LAUNCH, softcap, tanh
from tests.sagesim_kernels.contract import TANH
from tests.sagesim_kernels.error_balls import TINY
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.kernels import DEVICE, HERE

DEGREES = np.arange(3, 12, 2)
"""The degrees of the polynomial's terms behind x."""

TILE = 2**16 if IS_INTERPRETED else 2**12
INFINITY = 255 << 23
"""The bits of infinity; larger ones are NaN."""


@triton.jit
def tanh_kernel(x, out, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tanh(tl.load(x + at)))


def tanh_of(x: Tensor) -> Tensor:
    padded = torch.zeros(-(-x.numel() // TILE) * TILE, device=DEVICE)
    padded[: x.numel()] = x
    out = torch.empty_like(padded)
    tanh_kernel[(out.numel() // TILE,)](padded, out, TILE, **LAUNCH)
    return out[: x.numel()]


def of_bits(bits: Tensor) -> Tensor:
    return bits.to(DEVICE, torch.int32).view(torch.float32)


def check(x: Tensor) -> None:
    """The error of tanh(x) is within the bound, and tanh(-x) is -tanh(x); x: not negative."""
    found = tanh_of(x)
    exact = x.double().tanh()
    bound = TANH * exact + torch.where(x < TINY, TINY, 0.0).double()
    assert_within_bound(actual=found, exact=exact, bound=bound, what="tanh")
    assert_bitwise(actual=tanh_of(-x), expected=-found, what="tanh of the opposite")
    assert float(found.max()) <= 1.0


class TestKernel:
    pytestmark = HERE

    def test_the_error_is_within_the_bound(self) -> None:
        """For 2000 mantissas of each exponent up to infinity, and denser where tanh bends."""
        random = torch.Generator().manual_seed(0)
        mantissas = torch.randint(2**23, (2000,), generator=random)
        ends = torch.tensor([0, 1, 2**22 - 1, 2**22, 2**23 - 2, 2**23 - 1])
        exponents = torch.arange(255)[:, None] << 23
        check(of_bits((exponents + torch.cat([mantissas, ends])).flatten()))
        check(torch.linspace(0, 10, 400_000, device=DEVICE))

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("exponent", range(-13, 4))
    def test_the_error_is_within_the_bound_for_every_mantissa(self, exponent: int) -> None:
        """Of the exponents between those of numbers that are their own tanh and those with 1."""
        first = (127 + exponent) << 23
        check(of_bits(torch.arange(first, first + 2**23)))

    def test_small_numbers_are_their_own_tanh(self) -> None:
        """Also those below the smallest normal number, and zeros with their signs."""
        bits = torch.cat([torch.arange(2000), torch.arange(2**12, 100 << 23, 65_521)])
        x = of_bits(bits)
        assert_bitwise(actual=tanh_of(x), expected=x, what="tanh")
        assert_bitwise(actual=tanh_of(-x), expected=-x, what="tanh of negative numbers")

    def test_large_numbers_have_a_tanh_of_1(self) -> None:
        x = of_bits(torch.arange(130 << 23, INFINITY + 1, 65_536))
        x = x[x >= 11.0]
        assert float(x[-1]) == math.inf
        assert_bitwise(actual=tanh_of(x), expected=torch.ones_like(x), what="tanh")
        assert_bitwise(actual=tanh_of(-x), expected=-torch.ones_like(x), what="tanh of -x")

    def test_nan_stays(self) -> None:
        bits = [INFINITY + 2**22, INFINITY + 2**22 + 1, 2**31 - 1]  # numpy warns of others
        x = of_bits(torch.tensor([*bits, *(b - 2**31 for b in bits)]))
        assert bool(tanh_of(x).isnan().all())


def relative_error(
    x: NDArray[np.float64], coefficients: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The relative error of u / sqrt(1 + u^2), and its derivatives by the coefficients of u."""
    powers = x[:, None] ** DEGREES
    u = x + powers @ coefficients
    one = np.tanh(x)
    return u / np.hypot(1, u) / one - 1, powers / ((1 + u * u) ** 1.5 * one)[:, None]


def minimax() -> tuple[NDArray[np.float64], float]:
    """The coefficients of the least maximum of |relative_error|, and this maximum, by Remez."""
    x = np.linspace(1e-4, 12, 200_001)
    coefficients = np.array([1 / math.factorial(n) for n in DEGREES])
    peaks = 9 * np.sin(np.pi / 4 * (np.arange(len(DEGREES) + 1) + 0.5) / 3) ** 2
    signs = (-1.0) ** np.arange(len(peaks))
    for _ in range(12):
        for _ in range(20):  # Newton: the errors at the peaks are a level with alternating signs
            error, slopes = relative_error(peaks, coefficients)
            step = np.linalg.solve(np.column_stack([slopes, -signs]), -error)
            coefficients = coefficients + step[:-1]
        error, _ = relative_error(x, coefficients)
        runs = np.split(np.arange(len(x)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        peaks = np.array([x[run[np.abs(error[run]).argmax()]] for run in runs])
        assert len(peaks) == len(signs)
    return coefficients, float(np.abs(error).max())


def test_the_coefficients_are_those_of_the_least_error() -> None:
    """With as many peaks of one height and alternating signs as unknowns, no error is less."""
    coefficients, least = minimax()
    names = [f"_SINH_{n}" for n in DEGREES]
    used = np.array([getattr(softcap, name).value for name in names])
    assert used.astype(np.float32).tolist() == coefficients.astype(np.float32).tolist()
    x = np.linspace(1e-4, 12, 200_001)
    error, _ = relative_error(x, used.astype(np.float32).astype(float))
    assert np.abs(error).max() < min(1.02 * least, 0.98 * 2.0**-24)
