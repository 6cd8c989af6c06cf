"""Round Q, K, V and dO to codes with scales. A program rounds one block of tokens."""

# Pyright takes the annotations of Triton's functions literally:
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagesim.spec import Granularity, Precision
from sagesim_kernels.launching import launch, wait_for_earlier_kernels
from sagesim_kernels.operands.formats import code_max, format_of, memory_dtype, stored_codes
from sagesim_kernels.operands.grid import Grid, coordinates_of, programs_of
from sagesim_kernels.operands.kernel_problem import KernelProblem
from sagesim_kernels.operands.layout import (
    ALIGNMENT,
    Strided,
    TokenBlocks,
    length_of,
    part_columns,
    part_count,
    stored_rest_of,
    stored_start_of,
    stored_tokens,
    tile_ptrs,
    token_ptrs,
)
from sagesim_kernels.operands.masking import is_live_key, is_live_query
from sagesim_kernels.operands.means import Means, load_mean
from sagesim_kernels.operands.operand import (
    AS_TOKENS,
    IN_PAIRS,
    IN_REGISTERS,
    Operand,
    in_pairs,
    in_register_order,
    scales_of_block,
    stored_scales,
)
from sagesim_kernels.operands.rounding import (
    LAUNCH,
    Rounding,
    largest,
    magnitude,
    scale_and_inverse,
    to_codes,
)

VECTOR: Final = 16
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
def load_parts(x, mean, lengths, i, first, COUNT: tl.constexpr, h, b, blocks):
    """Load what `load_source` does of all channels: a tensor for each part; see `part_columns`."""
    parts = ()
    for j in tl.static_range(part_count(blocks.D)):
        column = part_columns(blocks, j)
        parts += (load_source(x, mean, lengths, i, first, COUNT, h, b, blocks, column),)
    return parts


@triton.jit
def load_source(x, mean, lengths, i, first, COUNT: tl.constexpr, h, b, blocks, column):
    """Load tokens first..first + COUNT of block i, minus the block's mean, float32.

    Tokens that are not live are 0, and so are channels from D on. column: the channels.
    """
    row = first + tl.arange(0, COUNT)
    if blocks.IS_KEY:
        cu, live = lengths.cu_k, is_live_key(lengths, b, row)
    else:
        cu, live = lengths.cu_q, is_live_query(lengths, b, row)
    mask = live[:, None] & (column < blocks.D)[None, :]
    ptrs = token_ptrs(x, cu, b, h, first, COUNT, column)
    tokens = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if mean is not None:
        index = 0 if blocks.IS_KEY else i  # K has one mean a head, Q one a block
        tokens = tl.where(mask, tokens - load_mean(mean, b, h, index, blocks.D, column), 0.0)
    return tokens


@triton.jit
def store_codes_of_tokens(out, codes, h, start, count, blocks, column):
    """Store codes [tokens, channels] of head h to the `Operand` out.

    start: the first token, in padded storage. count: tokens from there to the end of the storage of
        their sequence. column: the channels.
    """
    if out.ORDER == IN_REGISTERS:
        codes = tl.trans(in_register_order(tl.trans(codes)))
    elif out.ORDER == IN_PAIRS:
        codes = tl.trans(in_pairs(tl.trans(codes)))
    base = out.ptr + h.to(tl.int64) * out.stride_h
    ptrs = tile_ptrs(base, start, codes.shape[0], column, out.stride_n, out.stride_d)
    mask = column[None, :] < out.CHANNELS
    if blocks.BLOCK > ALIGNMENT:
        mask = mask & (tl.arange(0, codes.shape[0]) < count)[:, None]
    tl.store(ptrs, stored_codes(codes), mask=mask)


@triton.jit
def quantize_block(program, grid, x, mean, blocks, out, rounding, other, other_rounding, lengths):
    """Compute the codes and scales of a block of tokens and store them to one or two `Operand`."""
    i, h, b = coordinates_of(program, grid)
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    first = i * blocks.BLOCK
    if first < length_of(cu, n, b):
        tokens = load_parts(x, mean, lengths, i, first, blocks.BLOCK, h, b, blocks)
        store_block(out, tokens, rounding, lengths, i, h, b, blocks)
        if other is not None:
            store_block(other, tokens, other_rounding, lengths, i, h, b, blocks)


@triton.jit
def row_maxima(parts):
    """Return the largest `magnitude` of each row of tokens in parts."""
    found = largest(magnitude(parts[0]), 1)
    for j in tl.static_range(1, len(parts)):
        found = tl.maximum(found, largest(magnitude(parts[j]), 1))
    return found


@triton.jit
def _columns_of(parts, j: tl.constexpr):
    """Return the channels of part j of tokens, of which there are at most two parts."""
    first: tl.constexpr = parts[0].shape[1] if j else 0
    return tl.arange(0, parts[j].shape[1]) + first


@triton.jit
def store_block(out, tokens, rounding, lengths, i, h, b, blocks):
    """Store the codes and scales of block i to the `Operand` out.

    Return the scales, which broadcast to the tokens; those of the last part if each channel has its
    own. tokens: float32 [BLOCK, channels], in parts; see `load_parts`.
    """
    if blocks.IS_KEY:
        cu, n = lengths.cu_k, lengths.n_k
    else:
        cu, n = lengths.cu_q, lengths.n_q
    i = tl.cast(i, tl.int32)
    first = i.to(tl.int64) * blocks.BLOCK
    local = tl.arange(0, blocks.BLOCK)
    PARTS: tl.constexpr = len(tokens)
    scale_ptr = scales_of_block(out, cu, n, i, h, b, blocks.BLOCK)
    # Storage of longer blocks than its alignment ends before the last block does.
    count = stored_rest_of(cu, n, b, i * blocks.BLOCK)
    CODE_MAX: tl.constexpr = code_max(rounding.FORMAT)
    inverses = ()
    if out.BY_CHANNEL:
        for j in tl.static_range(PARTS):
            column = _columns_of(tokens, j)[None, :]
            amax = tl.max(magnitude(tokens[j]), 0)[None, :]
            scale, inverse = scale_and_inverse(amax, CODE_MAX)
            tl.store(scale_ptr + column, scale, mask=column < blocks.D)
            inverses += (inverse,)
    else:
        amax = row_maxima(tokens)[:, None]
        if out.TOKENS == 1:
            scale, inverse = scale_and_inverse(amax, CODE_MAX)
            if blocks.BLOCK > ALIGNMENT:
                tl.store(scale_ptr + local[:, None], scale, mask=local[:, None] < count)
            else:
                tl.store(scale_ptr + local[:, None], scale)
        else:
            scale, inverse = scale_and_inverse(tl.max(amax, 0)[None, :], CODE_MAX)
            tl.store(scale_ptr + tl.arange(0, 1)[None, :], scale)
        for _ in tl.static_range(PARTS):
            inverses += (inverse,)
    rows = (i * blocks.BLOCK + local)[:, None]
    start = stored_start_of(cu, n, b) + first
    for j in tl.static_range(PARTS):
        column = _columns_of(tokens, j)
        codes = to_codes(tokens[j] * inverses[j], rows, column[None, :], rounding)
        store_codes_of_tokens(out, codes, h, start, count, blocks, column)
    return scale


# The fields of a task are arguments of their own, because Triton 3.6 loses constexprs of nested
# tuples.
@triton.jit
def quantize_kernel(
    lengths,
    grid, x, mean, blocks, out, rounding, other, other_rounding,
    grid1, x1, mean1, blocks1, out1, rounding1, other1, other_rounding1,
    grid2, x2, mean2, blocks2, out2, rounding2, other2, other_rounding2,
    grid3, x3, mean3, blocks3, out3, rounding3, other3, other_rounding3,
):  # fmt: skip
    """Do up to four tasks, each a `Task`; those that are missing are None.

    The programs of a task go from the last block to the first, see `reversed_coordinates`.
    """
    wait_for_earlier_kernels()
    program = tl.program_id(0)
    end = programs_of(grid)
    if program < end:
        quantize_block(
            end - 1 - program, grid, x, mean, blocks, out, rounding, other, other_rounding, lengths
        )
    if x1 is not None:
        begin = end
        end = begin + programs_of(grid1)
        if (program >= begin) & (program < end):
            quantize_block(
                end - 1 - program, grid1, x1, mean1, blocks1, out1, rounding1, other1,
                other_rounding1, lengths,
            )  # fmt: skip
    if x2 is not None:
        begin = end
        end = begin + programs_of(grid2)
        if (program >= begin) & (program < end):
            quantize_block(
                end - 1 - program, grid2, x2, mean2, blocks2, out2, rounding2, other2,
                other_rounding2, lengths,
            )  # fmt: skip
    if x3 is not None:
        begin = end
        end = begin + programs_of(grid3)
        if (program >= begin) & (program < end):
            quantize_block(
                end - 1 - program, grid3, x3, mean3, blocks3, out3, rounding3, other3,
                other_rounding3, lengths,
            )  # fmt: skip


class Task(NamedTuple):
    """A tensor that is rounded to codes, for one product or two."""

    grid: Grid
    x: Strided
    mean: Means | None
    blocks: TokenBlocks
    out: Operand
    rounding: Rounding
    other: Operand | None  #: the one with codes along tokens, if there are two
    other_rounding: Rounding | None


_TASKS: Final = 4
"""The tasks of a launch, one for each of Q, K, V and dO."""


class Wanted(NamedTuple):
    """Codes of a tensor for a product."""

    source: TokenTensor
    precision: Precision
    granularity: Granularity
    contract_tokens: bool  #: whether the product sums over tokens; see `memory_of_codes`
    k_in_pairs: bool = False  #: see `memory_of_codes`


def quantize(problem: KernelProblem, wanted: Sequence[Wanted]) -> list[Operand]:
    """Round tensors to codes in new padded storage, in one launch. Each tensor is read once."""
    found, tasks = tasks_of(problem, wanted)
    # The means have just been computed, so the cache holds a part of these tensors.
    tasks.sort(key=lambda task: task.mean is None)
    if tasks:
        elements = max(task.blocks.BLOCK.value * task.blocks.D_PAD.value for task in tasks)
        launch(
            quantize_kernel,
            *arguments_of(tasks, problem, _TASKS),
            num_warps=4 if elements <= 8192 else 8,
            **LAUNCH,
        )
    return found


def arguments_of(tasks: Sequence[Task], problem: KernelProblem, most: int) -> Iterator[Any]:
    """Yield the programs of a launch that does these tasks, and the kernel's arguments.

    most: the tasks that the kernel has arguments for.
    """
    yield (sum(task.grid.programs[0] for task in tasks),)
    yield problem.lengths
    for task in tasks:
        yield from task
    yield from (None,) * len(Task._fields) * (most - len(tasks))


def tasks_of(
    problem: KernelProblem, wanted: Sequence[Wanted], channels: int = 0
) -> tuple[list[Operand], list[Task]]:
    """Return memory for the codes that are wanted, and a task for each tensor.

    channels: of a tile, a power of two; 0 for as few as the tensor has.
    """
    found = [memory_of_codes(*each) for each in wanted]
    of_tensors: dict[str, list[tuple[Wanted, Operand]]] = {}
    for pair in zip(wanted, found, strict=True):
        of_tensors.setdefault(pair[0].source.name, []).append(pair)
    return found, [_task(problem, pairs, channels) for pairs in of_tensors.values()]


def _task(problem: KernelProblem, wanted: Sequence[tuple[Wanted, Operand]], channels: int) -> Task:
    """Return the task of a tensor. wanted: what for, and memory; once or twice."""
    source = wanted[0][0].source
    heads, d = source.x.shape[1], source.x.shape[3]
    d_pad = channels or triton.next_power_of_2(wanted[0][1].CHANNELS.value)
    pairs = [
        (out, Rounding.of(problem.spec, source.name, each.precision))
        for each, out in sorted(wanted, key=lambda pair: pair[0].contract_tokens)
    ]
    (out, rounding), (other, other_rounding) = pairs if len(pairs) > 1 else (*pairs, (None, None))
    return Task(
        problem.token_grid(source.is_key, source.block, heads),
        Strided.of(source.x),
        source.mean,
        TokenBlocks.of(source.is_key, d, d_pad, source.block),
        out,
        rounding,
        other,
        other_rounding,
    )


def memory_of_codes(
    source: TokenTensor,
    precision: Precision,
    granularity: Granularity,
    contract_tokens: bool,
    k_in_pairs: bool = False,
) -> Operand:
    """Return padded storage for the codes of a tensor, and memory for their scales.

    contract_tokens: whether the product sums over tokens. Codes are then contiguous along tokens,
        so that they are always contiguous along the axis that is summed over. Those of 8 bit of Q,
        V and dO are in register order, see `in_register_order`; dS passes through shared memory
        before it meets K.
    k_in_pairs: whether the order of such codes of K is `in_pairs`, and not that of the tokens.
    """
    x, device = source.x, source.x.device
    heads, d = x.shape[1], x.shape[3]
    tokens = stored_tokens(source.cu, x)
    channels = -(-d // VECTOR) * VECTOR
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
    order = AS_TOKENS
    if contract_tokens and codes.element_size() == 1:
        of_k = IN_PAIRS if k_in_pairs else AS_TOKENS
        order = of_k if source.name == "k" else IN_REGISTERS
    return Operand.of_codes(
        codes,
        strides,
        channels,
        scale,
        per_scale,
        by_channel,
        along_tokens=contract_tokens,
        order=order,
        how=how,
    )
