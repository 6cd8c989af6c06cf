"""Triton's interpreter computes bfloat16 and FP8 as PyTorch does, in kernels of this package."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from sagesim_kernels.launching import launch, planned
from sagesim_kernels.operands.formats import E4M3, E5M2, FP8, nearest_number
from tests.support.assertions import assert_bitwise, assert_within_bound
from tests.support.kernels import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of the interpreter")

SIZE = 16
HARD = (0.0, -0.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1e-40, 3.4e38, float("inf"), float("nan"))
"""Ties, a subnormal number, one that overflows bfloat16, and what is not finite."""


@triton.jit
def convert_kernel(x, y, SIZE: tl.constexpr, TO: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at).to(TO))


@triton.jit
def exponential_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.exp2(tl.load(x + at)))


@triton.jit
def multiply_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at).to(tl.bfloat16)
    tl.store(y + at, tl.dot(tile, tl.trans(tile)))


def numbers() -> torch.Tensor:
    drawn = torch.randn(SIZE - len(HARD), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(HARD), drawn])


def test_exponentials_below_the_smallest_normal_number_are_0():
    x = torch.tensor([-300, -150, -149, -126.5, -126, -125.5, -1, -0.0, 0, 0.5, 127])
    x = torch.cat([x, torch.zeros(SIZE - len(x))])
    y = torch.empty(SIZE)
    launch(exponential_kernel, (1,), x, y, SIZE)
    exact = torch.where(x < -126, 0.0, torch.exp2(x.double()))
    assert_within_bound(actual=y, exact=exact, bound=2.0**-22 * exact, what="exp2")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize(
    ("to", "dtype"),
    [(tl.bfloat16, torch.bfloat16), (tl.float16, torch.float16), (tl.float32, torch.float32)],
)
def test_conversions(source, to, dtype):
    x = torch.arange(-5, SIZE - 5) * 257 if source is torch.int32 else numbers()
    x = x.to(source)
    y = torch.empty(SIZE, dtype=dtype)
    launch(convert_kernel, (1,), x, y, SIZE, to)
    expected = x.to(dtype)
    assert bool((y.isnan() == expected.isnan()).all())
    known = ~expected.isnan()  # the bits of a NaN are free
    assert_bitwise(actual=y[known], expected=expected[known], what=f"{source} as {dtype}")


@triton.jit
def fp8_kernel(x, codes, numbers, by_hand, SIZE: tl.constexpr, TO: tl.constexpr, HOW: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    y = tl.load(x + at)
    code = y.to(TO)
    tl.store(codes + at, code.to(tl.int8, bitcast=True))
    tl.store(numbers + at, code.to(tl.float32))
    tl.store(by_hand + at, nearest_number(y, HOW))


def every_half_way(dtype: torch.dtype) -> torch.Tensor:
    """Every number of an FP8 format, every number half way between two, and both neighbours of
    these in float32; subnormal numbers of float32, and numbers beyond the largest one."""
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()].unique()
    middle = (grid[1:] + grid[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(x)) for x in (torch.inf, -torch.inf))
    beyond = grid.abs().max() * torch.tensor([1 + 2.0**-22, 1.03])
    return torch.cat([grid, middle, up, down, beyond, -beyond, torch.tensor([1e-40, -1e-40, -0.0])])


@pytest.mark.parametrize(
    ("to", "how", "dtype"),
    [
        (tl.float8e4nv, E4M3, torch.float8_e4m3fn),
        (tl.float8e5, E5M2, torch.float8_e5m2),
    ],
)
def test_conversions_to_fp8(to, how, dtype):
    """Also those without an instruction for it. Numbers beyond the largest one become that one."""
    assert dtype in FP8.values()
    x = every_half_way(dtype)
    most = torch.finfo(dtype).max
    expected = x.clamp(-most, most).to(dtype)
    size = 64
    x = torch.nn.functional.pad(x, (0, -len(x) % size))
    codes = torch.empty(len(x), dtype=torch.int8)
    numbers, by_hand = torch.empty(len(x)), torch.empty(len(x))
    launch(fp8_kernel, (len(x) // size,), x, codes, numbers, by_hand, size, to, how)
    count = len(expected)
    assert_bitwise(
        actual=codes[:count].view(dtype).view(torch.int8),
        expected=expected.view(torch.int8),
        what="codes",
    )
    assert_bitwise(actual=numbers[:count], expected=expected.float(), what="numbers")
    by_hand = by_hand[:count].clamp(-most, most)
    # The sign of a zero has no effect.
    assert_bitwise(actual=by_hand + 0.0, expected=expected.float() + 0.0, what="by hand")


@triton.jit
def multiply_fp8_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at).to(tl.float8e4nv, bitcast=True)
    tl.store(y + at, tl.dot(tile, tl.trans(tile)))


def test_products_of_fp8():
    """Subnormal codes too, and sums beyond float16."""
    bits = torch.randint(0, 256, (SIZE, SIZE), generator=torch.Generator().manual_seed(0))
    bits = bits.to(torch.uint8).masked_fill(bits & 127 == 127, 0)  # NaN
    x = bits.view(torch.float8_e4m3fn).double()
    y = torch.empty(SIZE, SIZE)
    launch(multiply_fp8_kernel, (1,), bits.view(torch.int8), y, SIZE)
    expected = x @ x.mT
    assert bool((expected.abs() > 65504).any())
    bound = SIZE * 2.0**-24 * (x.abs() @ x.abs().mT)
    assert_within_bound(actual=y, exact=expected, bound=bound, what="product")


def multiply(tensors, options):
    (x,) = tensors
    y = torch.empty_like(x)
    launch(multiply_kernel, (1,), x, y, SIZE)
    return (y,)


def test_products_in_a_call_and_in_its_plan():
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    rounded = (8 * x).round() / 8  # with them, float32 sums are exact
    for _ in range(2):
        (y,) = planned(multiply, (rounded * (1 + 2.0**-10),), None)
        assert_bitwise(actual=y, expected=rounded @ rounded.mT, what="product")


def test_several_threads():
    """One thread at a time runs a kernel, and the others wait without an error."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    found = [torch.empty(SIZE) for _ in range(4)]

    def convert(y):
        for _ in range(20):
            launch(convert_kernel, (1,), x, y, SIZE, tl.float16)

    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(convert, found))
    for y in found:
        assert_bitwise(actual=y, expected=x.half().float(), what="y")


def test_the_interpreter_is_as_it_was_afterwards():
    """Also after an error. Triton itself keeps the last grid."""
    launch(convert_kernel, (1,), numbers(), torch.empty(SIZE), SIZE, tl.bfloat16)
    before = dict(vars(interpreter.interpreter_builder))
    module, language = dict(vars(interpreter)), dict(vars(tl.core))
    launch(convert_kernel, (1,), numbers(), torch.empty(SIZE), SIZE, tl.bfloat16)
    with pytest.raises(Exception):  # noqa: B017 - the interpreter has its own exceptions
        launch(convert_kernel, (1,), numbers(), torch.empty(SIZE), 3, tl.bfloat16)
    assert {**before, "grid_idx": 0} == {**vars(interpreter.interpreter_builder), "grid_idx": 0}
    assert module == vars(interpreter)
    assert language == vars(tl.core)
