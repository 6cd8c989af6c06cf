"""Sums of FP8 products on tensor cores: a model of the instruction, and bounds on its error.

A tensor core adds the products of one instruction and the number that it continues from as numbers
of fixed point. Hopper and Ada GPUs keep 13 bits behind the leading bit of the largest of them, and
return a number of 13 mantissa bits. A long sum of one sign therefore loses more the longer it is.
Blackwell GPUs keep 25 bits, as all of them do for 16-bit products.

Computed in float64, in which every step of the model is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_SMALLEST_EXPONENT: Final = -6
"""Of a normal FP8-E4M3 number. A smaller number counts as one of this exponent."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """How one tensor core instruction adds.

    Source: P. Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores",
    arXiv 2511.10909, which finds the same bits as the GPUs.
    """

    terms: int  #: products that are added at once
    aligned_bits: int  #: bits behind the leading bit of the largest number, which the others keep
    result_bits: int  #: mantissa bits of the result


HOPPER: Final = Instruction(terms=32, aligned_bits=13, result_bits=13)
"""wgmma with FP8 operands and float32 results."""

ADA: Final = Instruction(terms=16, aligned_bits=13, result_bits=13)
"""Each half of an mma.sync of 32 products, on GPUs of compute capability 8.9."""

BLACKWELL: Final = Instruction(terms=32, aligned_bits=25, result_bits=23)
"""tcgen05.mma and mma.sync, on GPUs of compute capability 10.0 and 12.0."""


def tensor_core_sum(
    left: Tensor, right: Tensor, how: Instruction = HOPPER, *, promote: int | None = None
) -> Tensor:
    """The sum over the last axis of left * right as a tensor core computes it, float64.

    The terms of one instruction are neighbours. Their order within it does not matter.

    Args:
        left, right: FP8-E4M3 codes, [..., n]; they broadcast.
        promote: after how many terms a sum begins anew; the sums are added in float32. A multiple
            of `how.terms`. None: never.

    Raises:
        ValueError: if promote is not a positive multiple of the terms of an instruction.
    """
    _check_promote(promote, how)
    left, right = torch.broadcast_tensors(left.double(), right.double())
    missing = -left.shape[-1] % how.terms
    left, right = (torch.nn.functional.pad(x, (0, missing)) for x in (left, right))
    products = (left * right).unflatten(-1, (-1, how.terms))
    exponents = (_exponent(left) + _exponent(right)).unflatten(-1, (-1, how.terms))
    exponents = exponents.masked_fill(products == 0, -(2**20))
    total = torch.zeros_like(products[..., 0, 0])
    part = torch.zeros_like(total)
    for step in range(products.shape[-2]):
        if promote is not None and step and step * how.terms % promote == 0:
            total, part = (total + part).float().double(), torch.zeros_like(part)
        part = _add(part, products[..., step, :], exponents[..., step, :], how)
    return (total + part).float().double()


def truncation_bound(
    left: Tensor, right: Tensor, how: Instruction = HOPPER, *, promote: int | None = None
) -> Tensor:
    """An upper bound on |tensor_core_sum - exact sum|, [...].

    In one instruction, each of the terms and the number that it continues from loses less than one
    unit: 2^-aligned_bits times the power of two below the largest of them. The result loses less
    than 2^-result_bits of itself. Everything is rounded towards 0. So each of these numbers is at
    most A, the sum of the magnitudes of the terms since the sum last began, where a subnormal code
    counts as 2^-6. With r = (terms + 1) 2^-aligned_bits + 2^-result_bits, m instructions lose at
    most m r A. The sums A of the parts that are promoted add up to the sum S of all magnitudes.
    With promotion after every m instructions, the loss is at most m r S for any length. Without it,
    m grows with the length, and so does the loss.

    Adding the promoted sums in float32 adds 2^-24 of the sum of magnitudes for each of them.

    Args:
        left, right, promote: as for `tensor_core_sum`.

    Raises:
        ValueError: if promote is not a positive multiple of the terms of an instruction.

    Source: ours.
    """
    _check_promote(promote, how)
    left, right = torch.broadcast_tensors(left.double().abs(), right.double().abs())
    floor = 2.0**_SMALLEST_EXPONENT
    sizes = left.clamp(min=floor) * right.clamp(min=floor)
    total = sizes.masked_fill(left * right == 0, 0.0).sum(-1)
    n = left.shape[-1]
    of_part = min(n, promote or n)
    return (relative_bound(of_part, how) + (n // of_part + 1) * 2.0**-24) * total


def relative_bound(terms: int, how: Instruction = HOPPER) -> float:
    """m r of `truncation_bound`, for a sum of so many terms without promotion."""
    r = (how.terms + 1) * 2.0**-how.aligned_bits + 2.0**-how.result_bits
    return r * -(-terms // how.terms)


def _check_promote(promote: int | None, how: Instruction) -> None:
    if promote is not None and (promote < 1 or promote % how.terms):
        raise ValueError(f"promote={promote} is not a positive multiple of {how.terms} terms")


def _add(carry: Tensor, products: Tensor, exponents: Tensor, how: Instruction) -> Tensor:
    """One instruction: carry [...] plus the products [..., terms]."""
    of_carry = (torch.frexp(carry).exponent - 1).masked_fill(carry == 0, -(2**20))
    largest = torch.maximum(exponents.amax(-1), of_carry)
    largest = largest.masked_fill(largest == -(2**20), 0)  # every number is 0
    unit = torch.exp2((largest - how.aligned_bits).double())
    total = (products / unit[..., None]).trunc().sum(-1) + (carry / unit).trunc()
    total = total * unit
    place = torch.exp2((torch.frexp(total).exponent - 1 - how.result_bits).double())
    return (total / place).trunc() * place


def _exponent(x: Tensor) -> Tensor:
    """The exponent of FP8-E4M3 codes."""
    return (torch.frexp(x).exponent - 1).clamp(min=_SMALLEST_EXPONENT)
