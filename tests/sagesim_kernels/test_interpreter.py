"""Triton's interpreter computes bfloat16 as PyTorch does, while it runs kernels of this package."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from sagesim_kernels.launch_plans import launch, planned
from tests.support.assertions import assert_bitwise
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
def multiply_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at).to(tl.bfloat16)
    tl.store(y + at, tl.dot(tile, tl.trans(tile)))


def numbers() -> torch.Tensor:
    drawn = torch.randn(SIZE - len(HARD), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor(HARD), drawn])


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


def test_the_interpreter_is_as_it_was_afterwards():
    """Also after an error."""
    before = dict(vars(interpreter.interpreter_builder))
    module, language = dict(vars(interpreter)), dict(vars(tl.core))
    launch(convert_kernel, (1,), numbers(), torch.empty(SIZE), SIZE, tl.bfloat16)
    with pytest.raises(Exception):  # noqa: B017 - the interpreter has its own exceptions
        launch(convert_kernel, (1,), numbers(), torch.empty(SIZE), 3, tl.bfloat16)
    assert {**before, "grid_idx": 0} == {**vars(interpreter.interpreter_builder), "grid_idx": 0}
    assert module == vars(interpreter)
    assert language == vars(tl.core)
