"""Round Q, K, V and dO to operands: codes with scales, or 16-bit values.

A program rounds one block of tokens: amax, then scale, then codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import Granularity, Precision
from sagesim_kernels.launch_plans import launch
from sagesim_kernels.operands.formats import code_max, format_of, memory_dtype, stored_codes
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Grid,
    Strided,
    TokenBlocks,
    coordinates_of,
    length_of,
    program_coordinates,
    programs_of,
    store_tokens,
    stored_start_of,
    stored_tokens,
    tile_ptrs,
    token_ptrs,
)
from sagesim_kernels.operands.masking import is_live_key, is_live_query
from sagesim_kernels.operands.means import Means, load_mean
from sagesim_kernels.operands.operand import (
    Operand,
    in_register_order,
    scale_start_of,
    stored_scales,
)
from sagesim_kernels.operands.rounding import (
    LAUNCH,
    Rounding,
    magnitude,
    scale_and_inverse,
    to_codes,
)

DTYPES: Final = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""The 16-bit precisions of a spec and their dtypes."""

_VECTOR: Final = 16
"""Bytes of a vector load. Rows of operands start at multiples of it. Loops that load channel by
channel are slow, and ptxas 12.8, which Triton 3.6 uses, miscompiles some of them: see
tests/support/sass.py."""


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """A tensor that is rounded to an operand, and how it is cut into blocks."""

    name: str  #: q, k, v or do
    x: Tensor  #: [sequences, heads, tokens, channels]
    mean: Means | None  #: what smoothing subtracts
    is_key: bool  #: whether its tokens are keys (k, v) or queries (q, do)
    block: int  #: tokens of a block of the spec
    longest: int  #: bound on the tokens of a sequence
    cu: Tensor | None  #: first token of each packed sequence


@triton.jit
def load_source(x, mean, lengths, i, first, COUNT: tl.constexpr, h, b, blocks):
    """Load tokens first..first + COUNT of block i, minus the block's mean, float32 [COUNT, D_PAD].

    Tokens that are not live are 0, and so are channels from D on.
    """
    tokens, mask = load_live(x, lengths, first, COUNT, h, b, blocks)
    tokens = tokens.to(tl.float32)
    if mean is not None:
        index = 0 if blocks.IS_KEY else i  # K has one mean a head, Q one a block
        tokens = tl.where(mask, tokens - load_mean(mean, b, h, index, blocks.D, blocks.D_PAD), 0.0)
    return tokens


@triton.jit
def load_live(x, lengths, first, COUNT: tl.constexpr, h, b, blocks):
    """Load tokens first..first + COUNT, [COUNT, D_PAD], and return which of the numbers are live.

    Numbers of tokens that are not live are 0, and so are channels from D on.
    """
    row = first + tl.arange(0, COUNT)
    column = tl.arange(0, blocks.D_PAD)
    if blocks.IS_KEY:
        cu, live = lengths.cu_k, is_live_key(lengths, b, row)
    else:
        cu, live = lengths.cu_q, is_live_query(lengths, b, row)
    mask = live[:, None] & (column < blocks.D)[None, :]
    ptrs = token_ptrs(x, cu, b, h, first, COUNT, column)
    return tl.load(ptrs, mask=mask, other=0.0), mask


@triton.jit
def _load_block(x, mean, lengths, i, h, b, blocks):
    """Load block i of sequence b and head h as `load_source` does."""
    return load_source(x, mean, lengths, i, i * blocks.BLOCK, blocks.BLOCK, h, b, blocks)


@triton.jit
def store_codes_of_tokens(out, codes, h, start, count, blocks):
    """Store codes [tokens, D_PAD] of head h to the `Operand` out.

    start: the first token, in padded storage. count: tokens from there to the end of the storage of
        their sequence.
    """
    column = tl.arange(0, blocks.D_PAD)
    if out.IN_REGISTER_ORDER:
        codes = tl.trans(in_register_order(tl.trans(codes)))
    base = out.ptr + h.to(tl.int64) * out.stride_h
    ptrs = tile_ptrs(base, start, codes.shape[0], column, out.stride_n, out.stride_d)
    mask = column[None, :] < out.CHANNELS
    if blocks.BLOCK > ALIGNMENT:
        mask = mask & (tl.arange(0, codes.shape[0]) < count)[:, None]
    tl.store(ptrs, stored_codes(codes), mask=mask)


@triton.jit
def quantize_block(program, grid, x, mean, out, rounding, blocks, lengths):
    """Compute the codes and scales of a block of tokens and store them to the `Operand` out."""
    i, h, b = coordinates_of(program, grid)
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    if i * blocks.BLOCK < length_of(cu, n, b):
        tokens = _load_block(x, mean, lengths, i, h, b, blocks)
        store_block(out, tokens, rounding, lengths, i, h, b, blocks)


@triton.jit
def store_block(out, tokens, rounding, lengths, i, h, b, blocks):
    """Store the codes and scales of block i to the `Operand` out; return the scales.

    tokens: those of `load_source`, [BLOCK, D_PAD]. The scales broadcast to them.
    """
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    i = tl.cast(i, tl.int32)
    first = i.to(tl.int64) * blocks.BLOCK
    local, column = tl.arange(0, blocks.BLOCK), tl.arange(0, blocks.D_PAD)
    scale_ptr = out.scale + h.to(tl.int64) * out.scale_stride_h
    scale_ptr += (scale_start_of(out, cu, n, b) + first // out.TOKENS) * out.scale_stride_n
    # Storage of longer blocks than its alignment ends before the last block does.
    count = tl.cdiv(length_of(cu, n, b), ALIGNMENT) * ALIGNMENT - i * blocks.BLOCK
    CODE_MAX: tl.constexpr = code_max(rounding.FORMAT)
    size = magnitude(tokens)
    if out.BY_CHANNEL:
        scale, inverse = scale_and_inverse(tl.max(size, 0)[None, :], CODE_MAX)
        tl.store(scale_ptr + column[None, :], scale, mask=column[None, :] < blocks.D)
    elif out.TOKENS == 1:
        scale, inverse = scale_and_inverse(tl.max(size, 1)[:, None], CODE_MAX)
        if blocks.BLOCK > ALIGNMENT:
            tl.store(scale_ptr + local[:, None], scale, mask=local[:, None] < count)
        else:
            tl.store(scale_ptr + local[:, None], scale)
    else:
        amax = tl.max(tl.max(size, 1)[:, None], 0)[None, :]
        scale, inverse = scale_and_inverse(amax, CODE_MAX)
        tl.store(scale_ptr + tl.arange(0, 1)[None, :], scale)
    rows = (i * blocks.BLOCK + local)[:, None]
    codes = to_codes(tokens * inverse, rows, column[None, :], rounding)
    start = stored_start_of(cu, n, b) + first
    store_codes_of_tokens(out, codes, h, start, count, blocks)
    return scale


# The fields of a task are arguments of their own, because Triton 3.6 loses constexprs of nested
# tuples.
@triton.jit
def quantize_kernel(
    lengths,
    grid, x, mean, out, rounding, blocks,
    grid1, x1, mean1, out1, rounding1, blocks1,
    grid2, x2, mean2, out2, rounding2, blocks2,
    grid3, x3, mean3, out3, rounding3, blocks3,
    grid4, x4, mean4, out4, rounding4, blocks4,
):  # fmt: skip
    """Do up to five tasks, each a `_Task`; those that are missing are None."""
    program = tl.program_id(0)
    end = programs_of(grid)
    if program < end:
        quantize_block(program, grid, x, mean, out, rounding, blocks, lengths)
    if x1 is not None:
        begin = end
        end = begin + programs_of(grid1)
        if (program >= begin) & (program < end):
            quantize_block(program - begin, grid1, x1, mean1, out1, rounding1, blocks1, lengths)
    if x2 is not None:
        begin = end
        end = begin + programs_of(grid2)
        if (program >= begin) & (program < end):
            quantize_block(program - begin, grid2, x2, mean2, out2, rounding2, blocks2, lengths)
    if x3 is not None:
        begin = end
        end = begin + programs_of(grid3)
        if (program >= begin) & (program < end):
            quantize_block(program - begin, grid3, x3, mean3, out3, rounding3, blocks3, lengths)
    if x4 is not None:
        begin = end
        end = begin + programs_of(grid4)
        if (program >= begin) & (program < end):
            quantize_block(program - begin, grid4, x4, mean4, out4, rounding4, blocks4, lengths)


class _Task(NamedTuple):
    """A tensor that is rounded to codes."""

    grid: Grid
    x: Strided
    mean: Means | None
    out: Operand
    rounding: Rounding
    blocks: TokenBlocks


_TASKS: Final = 5
"""The tasks of a launch."""


@triton.jit
def cast_kernel(grid, x, mean, out, lengths, STORED: tl.constexpr, blocks):
    """Round a block of tokens, minus its mean, to the 16-bit dtype of the `Strided` out.

    STORED: out is padded storage, and gets zeros from the end of a sequence to the next multiple of
    `ALIGNMENT`.
    """
    i, h, b = program_coordinates(grid)
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    tokens = _load_block(x, mean, lengths, i, h, b, blocks)
    last = length_of(cu, n, b)
    if STORED:
        start = stored_start_of(cu, n, b)
        last = tl.cdiv(last, ALIGNMENT) * ALIGNMENT
        first = start + i * blocks.BLOCK
        store_tokens(out, None, b, h, first, start + last, tokens, blocks.D)
    else:
        store_tokens(out, cu, b, h, i * blocks.BLOCK, last, tokens, blocks.D)


def quantize(
    problem: KernelProblem, wanted: Sequence[tuple[TokenTensor, Precision, Granularity, bool]]
) -> list[Operand]:
    """Round tensors to codes in new padded storage, several in a launch.

    wanted: a tensor, the precision, the granularity of the scales, and whether the product sums
        over tokens; see `memory_of_codes`.
    """
    tasks = [_task(problem, *each) for each in wanted]
    for i in range(0, len(tasks), _TASKS):
        some = tasks[i : i + _TASKS]
        programs = sum(task.grid.programs[0] for task in some)
        elements = max(task.blocks.BLOCK.value * task.blocks.D_PAD.value for task in some)
        missing = (None,) * len(_Task._fields) * (_TASKS - len(some))
        launch(
            quantize_kernel,
            (programs,),
            problem.lengths,
            *(field for task in some for field in task),
            *missing,
            num_warps=4 if elements <= 4096 else 8,
            **LAUNCH,
        )
    return [task.out for task in tasks]


def _task(
    problem: KernelProblem,
    source: TokenTensor,
    precision: Precision,
    granularity: Granularity,
    contract_tokens: bool,
) -> _Task:
    block, heads, d = source.block, source.x.shape[1], source.x.shape[3]
    out = memory_of_codes(source, precision, granularity, contract_tokens)
    return _Task(
        Grid(-(-source.longest // block), heads, problem.sequences),
        Strided.of(source.x),
        source.mean,
        out,
        Rounding.of(problem.spec, source.name, precision),
        TokenBlocks.of(source.is_key, d, triton.next_power_of_2(out.CHANNELS.value), block),
    )


def memory_of_codes(
    source: TokenTensor, precision: Precision, granularity: Granularity, contract_tokens: bool
) -> Operand:
    """Return padded storage for the codes of a tensor, and memory for their scales.

    contract_tokens: whether the product sums over tokens. Codes are then contiguous along tokens,
        so that they are always contiguous along the axis that is summed over. Those of 8 bit of Q,
        V and dO are in register order, see `in_register_order`; dS passes through shared memory
        before it meets K.
    """
    x, device = source.x, source.x.device
    heads, d = x.shape[1], x.shape[3]
    tokens = stored_tokens(source.cu, x)
    channels = -(-d // _VECTOR) * _VECTOR
    per_scale = 1 if granularity is Granularity.PerToken else source.block
    by_channel = granularity is Granularity.PerBlockChannel
    how = format_of(precision)
    codes = torch.empty(heads * tokens * channels, dtype=memory_dtype(how), device=device)
    scale = torch.empty(
        (heads, stored_scales(source.cu, x, per_scale), d if by_channel else 1),
        dtype=torch.float32,
        device=device,
    )
    stride_n, stride_d = (1, tokens) if contract_tokens else (channels, 1)
    strides = (0, tokens * channels, stride_n, stride_d)
    in_order = contract_tokens and source.name != "k" and codes.element_size() == 1
    return Operand.of_codes(codes, strides, channels, scale, per_scale, by_channel, in_order, how)


def cast(
    problem: KernelProblem, source: TokenTensor, dtype: torch.dtype, *, stored: bool
) -> Operand:
    """Round a tensor to 16 bit; without a copy if it already is in the dtype and not smoothed.

    stored: copy it to padded storage, a batch of one.
    """
    x, block = source.x, source.block
    if source.mean is not None or stored:
        heads, d = x.shape[1], x.shape[3]
        shape, tokens = x.shape, source.longest
        if stored:
            shape = (1, heads, stored_tokens(source.cu, x), d)
            tokens = -(-source.longest // ALIGNMENT.value) * ALIGNMENT.value
        copy = torch.empty(shape, dtype=dtype, device=x.device)
        grid = Grid(-(-tokens // block), heads, problem.sequences)
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
    elements = _VECTOR // x.element_size()
    if x.shape[3] % elements:
        x = torch.nn.functional.pad(x, (0, -x.shape[3] % elements))
    aligned = x.data_ptr() % _VECTOR == 0 and all(n % elements == 0 for n in x.stride()[:3])
    if aligned and x.stride(3) == 1:
        return x
    # The copy of `pad` keeps the order of axes, so that heads may still be innermost.
    return x.clone(memory_format=torch.contiguous_format)
