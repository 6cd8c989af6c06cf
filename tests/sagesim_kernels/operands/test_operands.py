"""Operands have the layout that TMA loads need: padded storage, and rows of whole vectors."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim import FACTORED_QK, HALF_AWAY, HALF_EVEN, SAGEBWD, Precision
from sagesim.emulator.rounding import CODE_MAX, round_codes_
from sagesim.problem import resolve_input16
from sagesim_kernels.hopper.descriptors import tma_descriptor
from sagesim_kernels.launching import launch
from sagesim_kernels.operands import (
    LAUNCH,
    Copied,
    KernelProblem,
    OperandCache,
    Packing,
    Rounding,
    map_inverse,
    map_scale,
    stored_codes,
    to_codes,
)
from sagesim_kernels.operands.formats import (
    E4M3,
    E4M3_IN_FP16,
    E5M2,
    E5M2_IN_FP16,
    FP8,
    INT8,
    memory_dtype,
)
from sagesim_kernels.operands.layout import ALIGNMENT
from tests.sagesim_kernels.test_interpreter import every_half_way
from tests.support.assertions import assert_bitwise
from tests.support.compiler import OLDEST, ROOT
from tests.support.kernels import DEVICE, HERE

pytestmark = HERE

SPEC = resolve_input16(FACTORED_QK, torch.float16)


def tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, count, 24, generator=generator).half().to(DEVICE)


def packed(q: tuple[int, ...], k: tuple[int, ...], **mask: bool) -> KernelProblem:
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        for lengths in (q, k)
    )
    return KernelProblem.of(
        tokens(sum(q), 0),
        tokens(sum(k), 1),
        tokens(sum(k), 2),
        spec=SPEC,
        scale=1.0,
        is_causal=mask.get("is_causal", False),
        lower_right=mask.get("lower_right", False),
        packing=Packing(cu_q, cu_k, max(q), max(k)),
    )


def stored(operand: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return each sequence's part of padded storage, including the padding after it."""
    align = ALIGNMENT.value
    starts = [(start // align + b) * align for b, start in enumerate(accumulate((0, *lengths)))]
    ends = [start + -(-n // align) * align for start, n in zip(starts, lengths, strict=False)]
    assert operand.shape[0] == 1 and operand.shape[2] >= ends[-1]
    return [operand[0, :, start:end] for start, end in zip(starts, ends, strict=False)]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    """Each part holds the expected tokens and then zeros."""
    for part, own in zip(found, expected, strict=True):
        n = own.shape[1]
        assert_bitwise(actual=part[:, :n], expected=own, what="tokens")
        assert not bool(part[:, n:].any())


def test_each_sequence_ends_in_zeros():
    lengths_q, lengths_k = (130, 0, 5, 128, 64), (7, 200, 128, 0, 1)
    problem = packed(lengths_q, lengths_k)
    do = tokens(sum(lengths_q), 3)
    operands = OperandCache(problem, do, copied=Copied(True, True))
    for x, at, lengths in (
        (problem.q, ("dk", "q"), lengths_q),
        (do, ("dp", "do"), lengths_q),
        (problem.v, ("dp", "v"), lengths_k),
        # smoothed; expected: the smoothed K that is not in padded storage
        (OperandCache(problem, do).get("dq", "k").ptr, ("dq", "k"), lengths_k),
    ):
        check(stored(operands.get(*at).ptr, lengths), list(x[0].split(lengths, 1)))


def test_the_dead_are_zeros():
    """Queries that attend to no key are 0 in padded storage, and keys that no query attends to."""
    lengths = (10, 3)
    problem = packed(lengths, (4, 3), is_causal=True, lower_right=True)
    problem.q[0, :, :6] = float("nan")
    operands = OperandCache(problem, problem.q.clone(), copied=Copied(True, True))
    for at in (("dk", "q"), ("dp", "do")):
        first, second = stored(operands.get(*at).ptr, lengths)
        assert not bool(first[:, :6].any())
        check([first[:, 6:], second], [problem.q[0, :, 6:10], problem.q[0, :, 10:]])
    problem = packed((2,), (5,), is_causal=True)
    problem.v[0, :, 2:] = float("nan")
    check(
        stored(OperandCache(problem, copied=Copied(True, True)).get("pv", "v").ptr, (5,)),
        [problem.v[0, :, :2]],
    )


def test_keys_are_smoothed_by_a_kernel_where_they_are_what_it_rounds_to():
    """A kernel that subtracts the mean itself gets what `cast_kernel` gives: one rounding."""
    problem = packed((3,), (130,))
    do = problem.q
    others = (
        OperandCache(problem, do, copied=Copied(True, True)),
        OperandCache(replace(problem, k=problem.k.float()), do),
        OperandCache(replace(problem, spec=SAGEBWD), do),
    )
    for operands in others:
        found, mean = operands.get_unsmoothed("dq", "k")
        assert mean is None and found is operands.get("dq", "k")
    operands = OperandCache(problem, do)
    raw, mean = operands.get_unsmoothed("dq", "k")
    assert_bitwise(
        actual=operands.get("dq", "k").ptr,
        expected=(raw.ptr.float() - mean.ptr).half(),
        what="smoothed K",
    )


def test_what_is_expanded_is_copied_for_tma():
    """TMA cannot load a tensor with a stride of 0."""
    x = torch.zeros(1, 2, 8, 64, dtype=torch.float16)
    assert tma_descriptor(x, 8, 64).base is x
    assert tma_descriptor(x[:, :1].expand(-1, 3, -1, -1), 8, 64).base.stride() == (1536, 512, 64, 1)


@triton.jit
def _divide_kernel(first, scales, inverses, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    amax = (first + at).to(tl.float32, bitcast=True)
    tl.store(scales + at, map_scale(amax))
    tl.store(inverses + at, map_inverse(amax))


@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_scales_of_maps_are_divisions_rounded_once(exponent: int) -> None:
    """For every mantissa."""
    count = 2**23
    first = (127 + exponent) << 23
    scales, inverses = torch.empty(2, count, device=DEVICE)
    _divide_kernel[(count // 2**16,)](first, scales, inverses, 2**16, **LAUNCH)
    bits = torch.arange(first, first + count, dtype=torch.int32, device=DEVICE)
    amax = bits.view(torch.float32)
    code_max = torch.full_like(amax, 127.0)
    assert_bitwise(actual=scales, expected=amax / code_max, what="scale")
    assert_bitwise(actual=inverses, expected=code_max / amax, what="inverse")


def test_scales_of_maps_at_their_limits() -> None:
    amax = torch.tensor([0.0, 2.0**-149, 127 * 2.0**-128, math.inf, math.nan], device=DEVICE)
    scales, inverses = torch.empty(2, 8, device=DEVICE)
    for i, x in enumerate(amax.view(torch.int32).tolist()):
        _divide_kernel[(1,)](x, scales[i:], inverses[i:], 1, **LAUNCH)
    assert scales[:3].tolist() == [1.0] * 3 and inverses[:3].tolist() == [0.0] * 3
    assert bool(scales[3:5].isnan().all())


@triton.jit
def codes_kernel(x, codes, rounding, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    found = to_codes(tl.load(x + at), at, at, rounding)
    tl.store(codes + at, stored_codes(found))


@pytest.mark.parametrize("rounding", [HALF_EVEN, HALF_AWAY], ids=lambda x: x.mode.value)
@pytest.mark.parametrize(
    ("precision", "how"),
    [
        (Precision.INT8, INT8),
        (Precision.FP8_E4M3, E4M3),
        (Precision.FP8_E5M2, E5M2),
        (Precision.FP8_E4M3, E4M3_IN_FP16),
        (Precision.FP8_E5M2, E5M2_IN_FP16),
    ],
    ids=["int8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3 in fp16", "fp8_e5m2 in fp16"],
)
def test_codes_are_the_emulators_at_ties_and_near_them(precision, how, rounding):
    """A negative number that is rounded to 0 in FP8 has the code of -0."""
    most = CODE_MAX[precision]
    if precision is Precision.INT8:
        middle = torch.arange(-126.5, 127)
        neighbours = (torch.nextafter(middle, torch.tensor(end)) for end in (-200.0, 200.0))
        x = torch.cat([middle, *neighbours, torch.arange(-127.0, 128)])
    else:
        x = every_half_way(FP8[precision]).clamp(-most, most)
    size = 64
    padded = torch.nn.functional.pad(x, (0, -len(x) % size)).to(DEVICE)
    codes = torch.empty(len(padded), dtype=memory_dtype(how), device=DEVICE)
    kernels_rounding = Rounding.of(replace(SAGEBWD, rounding=rounding), "k")._replace(FORMAT=how)
    launch(codes_kernel, (len(padded) // size,), padded, codes, kernels_rounding, size, **LAUNCH)
    expected = round_codes_(x.clone()[None], precision, rounding, "k")[0]
    dtype = FP8[precision] if how in (E4M3, E5M2) else codes.dtype
    found = codes.cpu()[: len(x)].view(dtype)
    assert_bitwise(actual=found, expected=expected.to(dtype), what="codes")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="of the interpreter")
def test_codes_with_the_oldest_triton():
    """Triton before 3.9 computes -x as 0 - x, which is 0 and not -0 where x is 0."""
    test = f"{__file__}::{test_codes_are_the_emulators_at_ties_and_near_them.__name__}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (OLDEST, ROOT))),
        "TRITON_INTERPRET": "1",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert "10 passed" in found.stdout
