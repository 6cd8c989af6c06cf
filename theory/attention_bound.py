"""Elementwise bounds on the errors of quantized attention and of its gradients.

The bound is propagated through the computation. Rounding changes an operand by at most half a code
(a whole code under stochastic rounding, half a unit in the last place in 16 bits). The errors of
the operands bound the error of a logit, its exponential bounds the error of P, and so on to the
gradients. No term is estimated or dropped. Each of n float32 operations has a relative error of at
most 2**-24, and an absolute error of at most 2**-126 if its result is smaller than that. In FP8 the
error of an operand is relative to it, 2**-4 for E4M3, down to half a step of the subnormal numbers.
At an INT8 PV, a weight below 2**-118 of the largest one of its row may be 0.

`theory.bound_propagation` has the steps.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from sagesim.problem import AttentionOptions, AttentionProblem
from sagesim.spec import AttentionSpec
from theory.bound_propagation import AttentionBound, BoundPropagation
from theory.fp8_sums import Instruction
from theory.rounding import OUTPUT_GRIDS


def attention_bound(
    q: Tensor | AttentionProblem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    do: Tensor | None = None,
    *,
    spec: AttentionSpec,
    instruction: Instruction | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionBound:
    """Bound the error of every element of the outputs, for one spec and one input.

    Holds for the emulator and for the kernels, which differ in the order of float32 sums, and add
    parts of dQ as integers. Tensor cores of Hopper and Ada GPUs lose more in sums of FP8 products
    than float32 does: there, the bound holds for the kernels with their `instruction`.

    A bound is infinite, and never NaN, if an operand of a matmul in 16 bits may overflow and reach
    the element, or if the element may overflow in its output's dtype. Any row of a head reaches all
    of its dQ, because rows may share a scale. A bound is also infinite if P may overflow in
    float32. That takes an error of a logit of 88 or more, and a qk_recompute that rounds
    differently from qk. The sums of products are taken not to overflow in float32.

    Args:
        q, k, v, do, options: as for `sagesim.trace`; or an `AttentionProblem` alone, such as a
            recorded call.
        spec: the spec.
        instruction: how tensor cores add the FP8 products of dV, dQ and dK, such as
            `theory.fp8_sums.HOPPER`. None: in float32, as the emulator, Triton's interpreter, and
            GPUs without FP8 do.

    Raises:
        TypeError: if dtypes differ, or are none of float16, bfloat16 and float32. The bound counts
            float32 errors, which a computation of float64 tensors does not have.
        ValueError: if shapes do not fit each other, or an option does not fit the tensors or the
            other options.

    Source: this project. The first-order terms are those of Higham, "Accuracy and Stability of
    Numerical Algorithms", 2nd ed., section 3.1.
    """
    problem = AttentionProblem.of(q, k, v, do, **options)
    dtype = problem.q.dtype
    if dtype not in OUTPUT_GRIDS:
        raise TypeError(
            f"q is {dtype}; the bound is for float16, bfloat16 and float32: round the inputs to "
            "float32 first, with x.float()"
        )
    return BoundPropagation(problem, spec, instruction).bound()
