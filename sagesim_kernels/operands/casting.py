"""Round Q, K, V and dO to 16-bit operands, without a copy where the tensor already is one."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import Precision
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.grid import program_coordinates
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Strided,
    TokenBlocks,
    length_of,
    store_tokens,
    stored_start_of,
    stored_tokens,
)
from sagesim_kernels.operands.operand import Operand
from sagesim_kernels.operands.quantization import VECTOR, TokenTensor, load_source
from sagesim_kernels.operands.rounding import LAUNCH

DTYPES: Final = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""The 16-bit precisions of a spec and their dtypes."""


@triton.jit
def cast_kernel(grid, x, mean, out, lengths, STORED: tl.constexpr, blocks):
    """Round a block of tokens, minus its mean, to the 16-bit dtype of the `Strided` out.

    STORED: out is padded storage, and gets zeros from the end of a sequence to the next multiple of
    `ALIGNMENT`.
    """
    wait_for_earlier_kernels()
    i, h, b = program_coordinates(grid)
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    column = tl.arange(0, blocks.D_PAD)
    first = i * blocks.BLOCK
    tokens = load_source(x, mean, lengths, i, first, blocks.BLOCK, h, b, blocks, column)
    last = length_of(cu, n, b)
    if STORED:
        start = stored_start_of(cu, n, b)
        last = tl.cdiv(last, ALIGNMENT) * ALIGNMENT
        store_tokens(out, None, b, h, start + first, start + last, tokens, blocks.D)
    else:
        store_tokens(out, cu, b, h, first, last, tokens, blocks.D)


def cast(
    problem: KernelProblem, source: TokenTensor, dtype: torch.dtype, *, stored: bool
) -> Operand:
    """Round a tensor to 16 bit; without a copy if it already is in the dtype and not smoothed.

    stored: copy it to padded storage, a batch of one.
    """
    x, block = source.x, source.block
    if source.mean is not None or stored:
        heads, d = x.shape[1], x.shape[3]
        shape, together = x.shape, 1
        if stored:
            shape = (1, heads, stored_tokens(source.cu, x), d)
            together = max(ALIGNMENT.value // block, 1)
        copy = torch.empty(shape, dtype=dtype, device=x.device)
        grid = problem.token_grid(source.is_key, block, heads, together=together)
        launch(
            cast_kernel,
            grid.programs,
            grid,
            Strided.of(x),
            source.mean,
            Strided.of(copy),
            problem.lengths,
            stored,
            TokenBlocks.of(source.is_key, d, triton.next_power_of_2(d), block),
            **LAUNCH,
        )
        x = copy
    return operand_of_values(x.to(dtype), stored=stored)


def operand_of_values(x: Tensor, *, stored: bool = False) -> Operand:
    """Return x [sequences, heads, tokens, channels], in 16 bit, as an operand.

    stored: whether x is padded storage, a batch of one.
    """
    return Operand.of_values(_align_rows(x), stored=stored)


def _align_rows(x: Tensor) -> Tensor:
    """Return x in 16 bit, or a copy with padded channels, so that its rows are whole vectors."""
    elements = VECTOR // x.element_size()
    if x.shape[3] % elements:
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % elements))
    aligned = x.data_ptr() % VECTOR == 0 and all(n % elements == 0 for n in x.stride()[:3])
    if aligned and x.stride(3) == 1:
        return x
    # The copy of `pad` keeps the order of axes, so that heads may still be innermost.
    return x.clone(memory_format=torch.contiguous_format)
