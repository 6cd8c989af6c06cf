"""The integers that kernels are compiled with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sagesim_kernels.launching import Specialized
from sagesim_kernels.launching.arguments import complete, for_compiler


class Tokens(NamedTuple):
    ptr: Any
    stride: Any
    count: Any


def parameter(*, is_constexpr: bool = False, default: Any = None) -> Any:
    return SimpleNamespace(is_constexpr=is_constexpr, default=default)


def compiled_with(*args: Any) -> list[Any]:
    return for_compiler(SimpleNamespace(params=[parameter()] * len(args)), args)


@pytest.mark.parametrize("other", [0, 1, 2, 16, 96, -1, 2**31 - 1, -(2**31)])
def test_an_integer_is_as_good_as_any_other(other: int) -> None:
    (compiled,) = compiled_with(other)
    assert compiled == compiled_with(7)[0]
    assert compiled != 1 and compiled % 16


def test_an_integer_of_64_bits_stays_one() -> None:
    assert compiled_with(2**31) == compiled_with(2**40) == compiled_with(-(2**31) - 1)
    (compiled,) = compiled_with(2**31)
    assert compiled >= 2**31 and compiled % 16


@pytest.mark.parametrize("stride", [0, 1, 5, 128])
def test_strides_flags_and_what_is_no_integer_stay(stride: int) -> None:
    x = torch.zeros(3)
    given = Specialized(stride)
    tokens, *others = compiled_with(Tokens(x, given, 16), True, None, 0.5, given)
    assert type(tokens) is Tokens
    assert tokens.ptr is x and tokens.stride == stride and tokens.count == compiled_with(3)[0]
    assert others == [True, None, 0.5, stride] and others[0] is True


def test_constants_stay_and_defaults_are_added() -> None:
    params = [parameter(), parameter(is_constexpr=True), parameter(is_constexpr=True, default=64)]
    kernel = SimpleNamespace(params=params)
    args = complete(kernel, (3, (1, 16)))
    assert args == (3, (1, 16), 64)
    assert for_compiler(kernel, args) == [*compiled_with(3), (1, 16), 64]
    assert complete(kernel, args) == args
