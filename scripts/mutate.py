"""Plant realistic bugs in the kernels, one at a time, and check that the tests fail.

    python scripts/mutate.py [--jobs N] [--only NAME ...] [--out FILE.json [--add]]
    python scripts/mutate.py --ampere   the same for those for mma.sync and preparation, from PTX
    python scripts/mutate.py --hopper   the same for the kernels for Hopper, on such a GPU
    python scripts/mutate.py --show     print the recorded bugs and the first test that failed

Each bug is one replacement in a copy of the checkout, where the kernels' tests run until the first
failure. The test that caught the bug in the recorded run comes first. A bug of the kernels for
mma.sync or for Hopper names its tests, and no others run. The tests that bugs name, or all of them,
also run without a bug. FILE.json is written after each bug, and has the tests that passed without
one. An existing FILE.json needs --add. Then bugs that it has are not planted again, bugs that the
script no longer has are dropped, and tests that passed without a bug do not run again without one.
Each bug has the commit in which it was planted; a bug that has changed since is not planted again
by itself. Exits with 1 if fewer than 95 % of the bugs are caught, or if the tests fail without a
bug.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sagesim.command import exit_code
from sagesim.files import check_writable, write_text
from sagesim.terminal import Failure

ROOT = Path(__file__).parents[1]
KERNELS = "sagesim_kernels"
DATA = ROOT / "docs" / "data"
COPIED = ("sagebwd.py", "sagesim", KERNELS, "tests", "theory", "pyproject.toml", "README.md")
TESTS = [
    f"tests/sagesim_kernels/{name}.py"
    for name in (
        "operands/test_fixed_reference",
        "hopper/test_codes_rows",
        "test_fuzz",
        "operands/test_dq_sums",
        "operands/test_operands",
        "operands/test_grid",
        "operands/test_packed_tiles",
        "test_packing_kernel",
        "operands/test_program_order",
        "operands/test_tanh",
        "test_varlen",
        "test_attention",
        "test_invariance",
        "operands/test_row_bounds",
        "test_torch_compile",
        "test_support",
    )
]


_NO_SUCH_TEST = 4
"""Exit code of pytest if a test that it is given does not exist."""


@dataclass(frozen=True)
class Bug:
    """Replace `old` by `new` in a file, which must contain `old` exactly `times` times."""

    name: str
    file: str
    old: str
    new: str
    times: int = 1
    #: tests of `test_file`; all of the plan's tests if there are none
    tests: Sequence[str] = ()
    test_file: str = ""


BUGS = (
    # the order of programs
    Bug(
        "programs: a group with fewer heads has those of the first group",
        "operands/grid.py",
        "return program // group_heads, first_head + program % group_heads",
        "return program // group_heads, program % group_heads",
    ),
    Bug(
        "programs: the first place of a packed sequence belongs to the one before",
        "operands/grid.py",
        "is_later = _first_place(cu, middle, TOKENS) <= place",
        "is_later = _first_place(cu, middle, TOKENS) < place",
    ),
    Bug(
        "programs: places of packed sequences overlap",
        "operands/grid.py",
        "return tl.load(cu + b) // TOKENS + b",
        "return tl.load(cu + b) // TOKENS",
    ),
    Bug(
        "programs: too few for packed sequences of unequal length",
        "operands/grid.py",
        "places = sequences.total // tokens + count",
        "places = -(-sequences.total // tokens)",
    ),
    Bug(
        "programs: all tiles of packed sequences are in the first one",
        "operands/packed_tiles.py",
        "tl.store(found + 2 * rank + 1, b, mask=is_tile)",
        "tl.store(found + 2 * rank + 1, b * 0, mask=is_tile)",
    ),
    Bug(
        "programs: tiles of packed sequences without tokens are not the last",
        "operands/packed_tiles.py",
        "tl.maximum(end - begin, 0), -1)",
        "tl.maximum(end - begin, 0), 9)",
    ),
    Bug(
        "packing: a sequence that is too long passes",
        "packing_kernel.py",
        "(tl.max(length, 0) <= most)",
        "(tl.min(length, 0) <= most)",
    ),
    # Hopper's preparation, which runs in the interpreter
    *(
        Bug(
            f"{name}: a NaN of a key reaches no queries of the other block of its tile",
            f"hopper/{name}.py",
            old,
            "tile=None",
        )
        for name, old in (("codes_backward", "tile=_TILE_K"), ("fp8_rows", "tile=TILE_K.value"))
    ),
    # scales
    Bug(
        "a scale of 127.5",
        "operands/rounding.py",
        "code_max = tl.where(vanishing, CODE_MAX, CODE_MAX)",
        "code_max = tl.where(vanishing, CODE_MAX + 0.5, CODE_MAX + 0.5)",
    ),
    Bug(
        "an absolute epsilon in the scale",
        "operands/rounding.py",
        "scale = tl.math.div_rn(amax, code_max)",
        "scale = tl.math.div_rn(amax, code_max) + 1e-7",
    ),
    Bug(
        "scale is the reciprocal of the inverse",
        "operands/rounding.py",
        "scale = tl.math.div_rn(amax, code_max)",
        "scale = tl.math.div_rn(amax * 0 + 1.0, tl.math.div_rn(code_max, amax))",
    ),
    Bug(
        "zero regions divide by zero",
        "operands/rounding.py",
        "vanishing = amax <= CODE_MAX * 2.0**-128",
        "vanishing = amax < 0.0",
    ),
    Bug(
        "amax of x, not of |x|",
        "operands/rounding.py",
        "return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF",
        "return tl.maximum(x, 0.0).to(tl.int32, bitcast=True)",
    ),
    Bug(
        "channel scales along tokens",
        "operands/quantization.py",
        "amax = tl.max(magnitude(tokens[j]), 0)[None, :]",
        "amax = tl.max(tl.max(magnitude(tokens[j]), 0), 0) "
        "+ tl.zeros((1, column.shape[1]), tl.int32)",
    ),
    Bug(
        "scales of the next block of keys",
        "operands/operand.py",
        "ptr = base + tl.cast(first // x.TOKENS, tl.int64) * x.scale_stride_n",
        "ptr = base + tl.cast(tl.maximum(first // x.TOKENS - 1, 0), tl.int64) * x.scale_stride_n",
    ),
    Bug(
        "row scales swapped for the tile's first",
        "operands/operand.py",
        "return base + (row // x.TOKENS)",
        "return base + (0 * row + tl.min(row, 0) // x.TOKENS)",
    ),
    Bug(
        "K's scales of tokens forgotten",
        "operands/operand.py",
        "return s * (k_scale * 2.0**-10), factor * 2.0**10",
        "return s, factor",
    ),
    Bug(
        "K's scales of blocks forgotten",
        "operands/operand.py",
        "return s, factor * k_scale",
        "return s, factor",
    ),
    Bug(
        "K's scale of the first block, forward",
        "portable/forward.py",
        "load_block_scales(k, k_scales, key, sizes.BLOCK_K)",
        "load_block_scales(k, k_scales, 0, sizes.BLOCK_K)",
    ),
    Bug(
        "K's scale of the first block, delta from P",
        "portable/p_rows.py",
        "load_block_scales(k, k_scales, key, sizes.BLOCK_K)",
        "load_block_scales(k, k_scales, 0, sizes.BLOCK_K)",
    ),
    Bug(
        "K's scale of the first block, dK and dV",
        "portable/gradients.py",
        "load_token_scales(k, k_scales, first, sizes.TILE, n_k)",
        "load_token_scales(k, k_scales, 0, sizes.TILE, n_k)",
    ),
    Bug(
        "one scale for all tokens of a block",
        "operands/operand.py",
        "elif count == x.TOKENS:",
        "elif True:",
    ),
    Bug(
        "one scale for a tile of P and dS",
        "portable/p_and_ds.py",
        "if how.PER_TILE:",
        "if True:",
        2,
    ),
    Bug(
        "a scale per row where the tile has one",
        "portable/p_and_ds.py",
        "if how.PER_TILE:",
        "if False:",
        2,
    ),
    Bug(
        "codes of a map not in register order",
        "portable/p_and_ds.py",
        "code_product(in_register_order(codes), tokens)",
        "code_product(codes, tokens)",
    ),
    Bug(
        "codes of P not in register order in the forward",
        "portable/forward.py",
        "code_product(in_register_order(codes), v_tile)",
        "code_product(codes, v_tile)",
    ),
    Bug(
        "channel scale forgotten in a product of maps",
        "portable/p_and_ds.py",
        "return tl.fma(sums, scale * channel_scale[None, :], total)",
        "return total + sums * scale",
    ),
    Bug(
        "V's scale forgotten", "portable/forward.py", "weight[:, None] * v_scale", "weight[:, None]"
    ),
    # rounding
    Bug(
        "codes are cut off, not rounded",
        "operands/rounding.py",
        "return (y + _INTEGER_GRID).to(tl.int32, bitcast=True).to(tl.int8)",
        "return y.to(tl.int8)",
    ),
    Bug(
        "ties away from zero in half-even",
        "operands/rounding.py",
        "if rounding.MODE == _HALF_EVEN",
        "if rounding.MODE == -1",
        2,
    ),
    Bug(
        "ties to even in half-away",
        "operands/rounding.py",
        "if rounding.MODE == _HALF_AWAY:",
        "if False:",
    ),
    Bug(
        "random numbers of the tile, not of the head",
        "operands/quantization.py",
        "rows = (i * blocks.BLOCK + local)[:, None]",
        "rows = local[:, None]",
    ),
    Bug(
        "one stream of random numbers for all tensors",
        "operands/rounding.py",
        "tl.constexpr(STREAMS[tensor])",
        "tl.constexpr(0)",
    ),
    # smoothing
    Bug(
        "K mean over all heads",
        "operands/means.py",
        "row = (b.to(tl.int64) * means.heads + h) * means.means + index",
        "row = b.to(tl.int64) * means.heads * means.means + index",
    ),
    Bug(
        "K mean divided by the padded length",
        "operands/means.py",
        "tokens = tl.minimum(start + chunks * blocks.BLOCK, last) - tl.maximum(start, first)",
        "tokens = tl.cdiv(tl.minimum(start + chunks * blocks.BLOCK, last), 64) * 64 - start",
    ),
    Bug(
        "K mean over keys that no query attends to",
        "operands/means.py",
        "return first_live_key(lengths, b), live_keys(lengths, b)",
        "return first_live_key(lengths, b), lengths.n_k",
    ),
    Bug(
        "padding is smoothed into -mean",
        "operands/quantization.py",
        "tl.where(mask, tokens - load_mean(mean, b, h, index, blocks.D, column), 0.0)",
        "tokens - load_mean(mean, b, h, index, blocks.D, column)",
    ),
    Bug(
        "bias of smoothed Q dropped from S",
        "portable/forward.py",
        "s = s * factor[:, None] + bias[None, :] * scale",
        "s = s * factor[:, None] + bias[None, :] * 0.0",
    ),
    Bug(
        "bias branch of dK dropped",
        "portable/gradients.py",
        "dk_total += tl.sum(ds, 1)[:, None] * mean",
        "dk_total += tl.sum(ds, 1)[:, None] * mean * 0.0",
    ),
    Bug(
        "bias of the first query block everywhere",
        "portable/gradients.py",
        "bias = key_bias(subtracted, lengths, head, block,",
        "bias = key_bias(subtracted, lengths, head, 0,",
    ),
    Bug(
        "lse without the shift of K",
        "operands/logsumexp.py",
        "if shift is not None:",
        "if False:",
    ),
    Bug(
        "lse shift unscaled",
        "operands/logit_shift.py",
        "tl.arange(0, D_PAD))) * scale",
        "tl.arange(0, D_PAD)))",
    ),
    # softmax and masks
    Bug(
        "causal mask off by one, forward",
        "portable/forward.py",
        "visible = attends_in(lengths, b, queries[:, None], keys",
        "visible = attends_in(lengths, b, queries[:, None] - 1, keys",
    ),
    Bug(
        "causal mask off by one, dK and dV",
        "portable/gradients.py",
        "visible = attends_in(lengths, b, queries, keys",
        "visible = attends_in(lengths, b, queries + 1, keys",
    ),
    Bug(
        "causal mask off by one, delta from P",
        "portable/p_rows.py",
        "visible = attends_in(lengths, b, queries[:, None], keys",
        "visible = attends_in(lengths, b, queries[:, None] + 1, keys",
    ),
    Bug(
        "causal loop ends a tile early",
        "operands/masking.py",
        "tl.minimum(n_k, first + TILE + offset)",
        "tl.minimum(n_k, first + offset + 1)",
    ),
    Bug(
        "causal loop begins a block late",
        "operands/masking.py",
        "by_any = tl.maximum(first_live, first - offset)",
        "by_any = tl.maximum(first_live, first - offset + BLOCK)",
    ),
    Bug(
        "tiles on the diagonal taken for whole",
        "operands/masking.py",
        "by_all = tl.maximum(tl.minimum(n_k, first + offset + 1), 0)",
        "by_all = tl.maximum(tl.minimum(n_k, first + offset + BLOCK), 0)",
    ),
    Bug(
        "tiles on the diagonal taken for whole, dK and dV",
        "operands/masking.py",
        "by_all = tl.maximum(first_live, first + TILE - 1 - offset)",
        "by_all = tl.maximum(first_live, first - offset)",
    ),
    Bug(
        "last tile of keys taken for whole",
        "operands/masking.py",
        "return by_all // BLOCK * BLOCK,",
        "return tl.cdiv(by_all, BLOCK) * BLOCK,",
    ),
    Bug(
        "last tile of keys taken for whole, dK and dV",
        "operands/masking.py",
        "if first + TILE > n_k:",
        "if first > n_k:",
    ),
    Bug(
        "loop over whole tiles dropped",
        "portable/gradients.py",
        "-1 if lengths.key_mask is None else 0, -1",
        "0, -1",
    ),
    Bug(
        "least of negative logits taken for the largest",
        "portable/forward.py",
        "s = -s",
        "s = s",
    ),
    Bug(
        "-inf times a scale of 0",
        "portable/forward.py",
        's = tl.where(visible, s * factor[:, None], -float("inf"))',
        's = tl.where(visible, s, -float("inf")) * factor[:, None]',
    ),
    Bug(
        "keys behind the last not masked",
        "operands/masking.py",
        "return (keys < n_k) & (keys <= queries + offset)",
        "return keys <= queries + offset",
    ),
    Bug(
        "lower right aligned as upper left",
        "operands/masking.py",
        "if lengths.LOWER_RIGHT:",
        "if False:",
    ),
    Bug(
        "old maximum not rescaled",
        "portable/forward.py",
        "tl.fma(sums, weight[:, None] * v_scale, total * shrink[:, None])",
        "tl.fma(sums, weight[:, None] * v_scale, total)",
    ),
    Bug(
        "row sum not rescaled",
        "portable/forward.py",
        "row_sum = row_sum * shrink + tl.sum(p, 1) * weight",
        "row_sum = row_sum + tl.sum(p, 1) * weight",
    ),
    Bug(
        "P codes against the running maximum",
        "portable/forward.py",
        "p = 127.0 * tl.exp2(s * factor[:, None] - _finite(tile_max)[:, None])",
        "p = 127.0 * tl.exp2(s * factor[:, None] - _finite(new_max)[:, None])",
    ),
    Bug(
        "rows without keys are NaN",
        "portable/forward.py",
        'return tl.where(x == -float("inf"), 0.0, x)',
        "return x",
    ),
    Bug(
        "lse in the wrong base",
        "operands/logsumexp.py",
        "result = row_lse2 * _LN_2",
        "result = row_lse2",
    ),
    Bug(
        "empty rows get P = inf",
        "portable/forward.py",
        'row_lse2 = tl.where(has_keys, row_lse2, float("inf"))',
        "row_lse2 += 0.0",
    ),
    # gradients
    Bug("dQ not scaled", "operands/dq_sums.py", "n_q, total * scale,", "n_q, total,"),
    Bug(
        "dK not scaled",
        "portable/gradients.py",
        "dk_total * scale.natural",
        "dk_total",
    ),
    Bug(
        "1/sqrt(d) of the padded head",
        "operands/kernel_problem.py",
        "1 / math.sqrt(q.shape[-1])",
        "1 / math.sqrt(padded(q.shape[-1]))",
    ),
    Bug(
        "delta forgotten in dK",
        "portable/gradients.py",
        "ds = p * (dp - row_delta[None, :])",
        "ds = p * dp",
    ),
    Bug(
        "delta from O where it is from P",
        "portable/p_rows.py",
        "delta if spec.delta is Delta.FROM_P else None,",
        "None,",
    ),
    Bug(
        "delta from O not computed",
        "preparation/backward.py",
        "if spec.delta is Delta.FROM_O:",
        "if False:",
    ),
    # sums of dQ
    Bug(
        "units that let sums overflow",
        "operands/dq_units.py",
        "_BITS = tl.constexpr(30)",
        "_BITS = tl.constexpr(44)",
    ),
    Bug(
        "units without the row sums of a P that is not the forward's",
        "operands/dq_units.py",
        "if problem.spec.qk == problem.spec.qk_recompute:",
        "if problem.spec is not None:",
    ),
    Bug(
        "coarse units",
        "operands/dq_units.py",
        "_BITS = tl.constexpr(30)",
        "_BITS = tl.constexpr(12)",
    ),
    Bug(
        "a NaN lost in the sums of dQ",
        "operands/dq_units.py",
        'return tl.where(is_bad, float("nan"), unit)',
        "return unit",
    ),
    Bug(
        "a NaN of a row not in the scale of its tile",
        "operands/dq_units.py",
        "if growths.IN_TILE:  # A NaN",
        "if False:  # A NaN",
    ),
    Bug(
        "an infinity of dS in FP16 lost",
        "portable/gradients.py",
        "if k_right.scale is None and k_right_tile.dtype == tl.float16:",
        "if False:",
    ),
    Bug(
        "units of the scale of a region of zeros",
        "operands/key_bounds.py",
        "k_amax = largest(magnitude(tokens), 1)",
        "k_amax = largest(magnitude(tl.maximum(tl.abs(tokens), 127.0)), 1)",
    ),
    Bug(
        "units of keys that a query does not attend to",
        "operands/key_bounds.py",
        "largest(tl.where(visible, keys[None, :], 0), 1)",
        "largest(tl.where(visible, keys[None, :], keys[None, :]), 1)",
    ),
    Bug(
        "a V that is not finite left out of the units",
        "operands/key_bounds.py",
        "at, magnitude(norms), sizes.BLOCK_K)\n\n    k_base",
        'at, magnitude(tl.where(norms < float("inf"), norms, 0.0)), sizes.BLOCK_K)\n\n    k_base',
    ),
    Bug(
        "a NaN of its tile in a query that attends to nothing",
        "operands/dq_sums.py",
        'tl.where((row_lse2 != float("inf"))[:, None], total, 0.0)',
        "total + 0.0",
    ),
    Bug(
        "units of the next row",
        "operands/dq_sums.py",
        "return inverse_of(tl.load(dq_sums.unit + at + tl.arange(0, count)))",
        "return inverse_of(tl.load(dq_sums.unit + at + 1 + tl.arange(0, count)))",
    ),
    Bug(
        "norms of V without its first block of keys",
        "operands/key_bounds.py",
        "for index in range(first_block, blocks, BLOCKS_AT_ONCE):",
        "for index in range(first_block + 1, blocks, BLOCKS_AT_ONCE):",
    ),
    # windows, padding, sinks and softcaps
    Bug(
        "window a key too long on the left",
        "operands/masking.py",
        "visible & (keys >= queries + lowest_diagonal(lengths, b))",
        "visible & (keys >= queries + lowest_diagonal(lengths, b) - 1)",
    ),
    Bug(
        "window a key too short on the left",
        "operands/masking.py",
        "return _alignment(lengths, b) - lengths.left",
        "return _alignment(lengths, b) - lengths.left + 1",
    ),
    Bug(
        "window a key too long on the right",
        "operands/masking.py",
        "offset += lengths.right",
        "offset += lengths.right + 1",
    ),
    Bug(
        "window aligned at the upper left",
        "operands/masking.py",
        "if lengths.LOWER_RIGHT:",
        "if lengths.LOWER_RIGHT and lengths.left is None:",
    ),
    Bug(
        "first block of a window without its mask",
        "operands/masking.py",
        "whole = tl.cdiv(tl.maximum(first + TILE - 1 + lowest, 0), BLOCK) * BLOCK",
        "whole = begin",
    ),
    Bug(
        "last queries of a window without their mask",
        "operands/masking.py",
        "tl.maximum(tl.minimum(n_q, first - lowest + 1), 0) // BLOCK * BLOCK",
        "end // BLOCK * BLOCK",
    ),
    Bug(
        "loop over the queries of a window ends a block early",
        "operands/masking.py",
        "end = tl.minimum(n_q, tl.maximum(first + TILE - lowest, 0))",
        "end = tl.minimum(n_q, tl.maximum(first - lowest, 0))",
    ),
    Bug(
        "padded keys in the mean of K",
        "operands/means.py",
        "live = is_live_key(lengths, b, tokens) if IS_KEY",
        "live = live if IS_KEY",
    ),
    Bug(
        "padded keys counted in the mean of K",
        "operands/means.py",
        "tokens += tl.sum((live & (row < end * blocks.BLOCK)).to(tl.int32), 0)",
        "tokens += tl.sum((row < end * blocks.BLOCK).to(tl.int32), 0)",
    ),
    Bug(
        "padded keys in the scales",
        "operands/masking.py",
        "live = live & is_unmasked(lengths, b, keys, last)",
        "live = live & (keys >= 0)",
    ),
    Bug(
        "padded values multiplied by 0",
        "portable/forward.py",
        "PART == 0, first_key, live",
        "PART == 0, first_key",
    ),
    Bug(
        "queries without keys in the scales",
        "operands/masking.py",
        "live = live & (keys_of(lengths, b, queries) > 0)",
        "live = live & (queries >= 0)",
    ),
    Bug(
        "key mask of another sequence",
        "operands/masking.py",
        "return lengths.key_mask + b.to(tl.int64) * lengths.n_k",
        "return lengths.key_mask + 0 * b.to(tl.int64)",
    ),
    Bug(
        "lengths of the first sequence for all",
        "operands/masking.py",
        "tl.load(lengths.seqused_k + b)",
        "tl.load(lengths.seqused_k + 0 * b)",
    ),
    Bug(
        "a key behind the length of a sequence",
        "operands/masking.py",
        "n = tl.minimum(tl.maximum(used, 0), n).to(tl.int32)",
        "n = tl.minimum(tl.maximum(used + 1, 0), n).to(tl.int32)",
    ),
    Bug(
        "queries of a sequence of length 0 in the scales",
        "operands/masking.py",
        "n = tl.where(_used_keys(lengths, b) > 0, n, 0)",
        "n = tl.where(_used_keys(lengths, b) >= 0, n, 0)",
    ),
    Bug(
        "sink left out of the forward",
        "operands/sinks.py",
        "return rescaled + tl.exp2(sink2 - finite_max), new_max, sqrt_rescale",
        "return rescaled, new_max, sqrt_rescale",
    ),
    Bug(
        "sink relative to the logits before smoothing",
        "operands/sinks.py",
        "rows = rows - shift",
        "rows = rows - 0 * shift",
    ),
    Bug(
        "gradient of the sinks is 0",
        "operands/sinks.py",
        "return -(p_sink * delta)",
        "return -(0 * p_sink * delta)",
    ),
    Bug(
        "sink left out of the gradient of Q",
        "operands/sinks.py",
        "found = p_sink * statistics.delta.ptr",
        "found = 0 * p_sink * statistics.delta.ptr",
    ),
    Bug(
        "tanh's derivative forgotten",
        "portable/gradients.py",
        "ds *= slope",
        "ds *= 1.0",
    ),
    Bug(
        "softcap of the smoothed logits, forward",
        "portable/forward.py",
        "tl.fma(s, factor[:, None], row_shift[:, None])",
        "s * factor[:, None]",
    ),
    Bug(
        "mean of K left out of dQ under a softcap",
        "portable/gradients.py",
        "ds_sum = tl.sum(ds, 0)[:, None]",
        "ds_sum = 0.0 * tl.sum(ds, 0)[:, None]",
    ),
    Bug(
        "mean of K left out of the units of dQ under a softcap",
        "operands/key_bounds.py",
        "magnitude(k_amax.to(tl.float32, bitcast=True) + mean_amax)",
        "magnitude(k_amax.to(tl.float32, bitcast=True) * 2.0**-20)",
    ),
    Bug(
        "tanh without one of its terms",
        "operands/softcap.py",
        "series = tl.fma(series, square, _SINH_7)",
        "series = tl.fma(series, square, 0.0)",
    ),
    Bug(
        "gradient of lse dropped",
        "operands/delta.py",
        "result -= load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)",
        "result -= 0.0",
    ),
    Bug(
        "mean of K dropped from the gradient of lse",
        "operands/dq_sums.py",
        "total += ds_sum * load_k_mean(",
        "total += 0.0 * ds_sum * load_k_mean(",
    ),
    Bug(
        "qk_recompute takes qk's codes",
        "portable/backward.py",
        'operands.get("qk_recompute", "q")',
        'operands.get("qk", "q")',
    ),
    Bug(
        "dV takes dp's dO",
        "portable/backward.py",
        "same_right=self.do_right is self.do",
        "same_right=True",
    ),
    Bug(
        "dp reads dv's dO",
        "portable/backward.py",
        'operands.get("dp", "do")',
        'operands.get("dv", "do")',
    ),
    # scales from bounds
    Bug(
        "the bound on dS without delta",
        "operands/row_bounds.py",
        "of_p * (of_do * of_v + tl.abs(row_delta))",
        "of_p * (of_do * of_v)",
    ),
    Bug(
        "the bound on dS is that of P",
        "operands/row_bounds.py",
        "of_p * (of_do * of_v + tl.abs(row_delta))",
        "of_p",
    ),
    Bug(
        "the best top code is not looked for",
        "operands/row_bounds.py",
        "if TOPS > 1:",
        "if TOPS > 8:",
    ),
    Bug(
        "the scale of a row takes the largest code for its top code",
        "operands/row_bounds.py",
        "tops = tl.reshape(best, (TILE,))",
        "tops = tl.full((TILE,), code_max(FORMAT), tl.float32)",
    ),
    Bug(
        "the last top code is skipped",
        "operands/row_bounds.py",
        "for _ in range(TOPS):",
        "for _ in range(TOPS - 1):",
    ),
    Bug(
        "a negative number that FP8 in float16 rounds to 0 loses its sign",
        "operands/formats.py",
        "(nearest.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)",
        "nearest",
    ),
    Bug(
        "a padded key in the largest norm of V",
        "operands/row_bounds.py",
        "tokens = load_tokens(v, base, first, sizes.TILE, n_k, sizes.DV_PAD, low, live)\n"
        "    scale = load_token_scales(v, scales, first, sizes.TILE, n_k)\n"
        "    found = norms(numbers_of(v, tokens) * scale[:, None])\n"
        "    is_key = (keys >= low) & (keys < n_k)\n"
        "    if lengths.key_mask is not None:",
        "tokens = load_tokens(v, base, first, sizes.TILE, n_k, sizes.DV_PAD, low)\n"
        "    scale = load_token_scales(v, scales, first, sizes.TILE, n_k)\n"
        "    found = norms(numbers_of(v, tokens) * scale[:, None])\n"
        "    is_key = (keys >= low) & (keys < n_k)\n"
        "    if False:",
    ),
    Bug(
        "P's bound of other logits than P",
        "portable/p_rows.py",
        "top = tl.maximum(top, tl.max(s, 1))",
        "top = tl.maximum(top, tl.max(s, 1) * 0.99 - 0.01)",
    ),
    Bug(
        "P's bound of the last block of keys",
        "portable/p_rows.py",
        "top = tl.maximum(top, tl.max(s, 1))",
        "top = tl.max(s, 1)",
    ),
    Bug(
        "a row's NaN is not in its bound",
        "portable/p_rows.py",
        "bound = tl.where(p_sum == p_sum, tl.exp2(top), p_sum)",
        "bound = tl.exp2(top)",
    ),
    Bug(
        "dO not multiplied by the bound of P",
        "operands/row_bounds.py",
        "return tokens * load_rows(bound, lengths.cu_q, b, h, queries, n_q, 0.0)[:, None]",
        "return tokens",
    ),
    Bug(
        "dQ without the scale of its row",
        "portable/p_and_ds.py",
        "product * (scale[:, None] * inverse_unit * channel_scale[None, :])",
        "product * (inverse_unit * channel_scale[None, :])",
    ),
    Bug(
        "the unit of dQ without the bound of its row",
        "operands/dq_units.py",
        "is_finite = is_finite & (row_bound < _LARGEST)",
        "is_finite = is_finite & (row_bound == row_bound) | (row_bound != row_bound)",
    ),
    Bug(
        "scales of long blocks of packed sequences overlap",
        "operands/operand.py",
        "return tl.load(cu + b).to(tl.int64) // x.TOKENS + b",
        "return tl.load(cu + b).to(tl.int64) // x.TOKENS",
    ),
    # layout
    Bug(
        "stale stride: dO taken for contiguous",
        "dispatch.py",
        "            operands.quantize(*_BACKWARD)",
        "            do = do.as_strided(do.shape, torch.empty(do.shape).stride())\n"
        "            operands = OperandCache(problem, do, k_mean=result.k_mean)\n"
        "            operands.quantize(*_BACKWARD)",
    ),
    Bug(
        "rows that have not failed are computed again, and stored",
        "portable/forward.py",
        "queries = tl.where(is_stored, queries, n_q)",
        "is_stored = queries < n_q",
    ),
    Bug(
        "failed rows of the last tile are left out",
        "portable/forward.py",
        "tl.minimum(first + _ROWS, n_q), sizes.TILE)",
        "tl.minimum(first + _ROWS, n_q) - sizes.TILE, sizes.TILE)",
    ),
    Bug(
        "query heads grouped by remainder",
        "portable/forward.py",
        "k_head = h // sizes.GROUPS",
        "k_head = h % (heads // sizes.GROUPS)",
    ),
    Bug(
        "last head of a group dropped",
        "portable/gradients.py",
        "range(k_head * sizes.GROUPS, (k_head + 1) * sizes.GROUPS)",
        "range(k_head * sizes.GROUPS, (k_head + 1) * sizes.GROUPS - (sizes.GROUPS > 1))",
    ),
    Bug(
        "load without other, beyond the last channel",
        "operands/operand.py",
        "valid = valid[:, None] & (tl.arange(0, D_PAD) < x.CHANNELS)[None, :]",
        "valid = valid[:, None]",
    ),
    Bug(
        "codes behind the last channel are not written",
        "operands/quantization.py",
        "mask = column[None, :] < out.CHANNELS",
        "mask = column[None, :] < blocks.D",
    ),
    Bug(
        "garbage of packed neighbours in amax",
        "operands/masking.py",
        "live = (queries >= first) & (queries < last)",
        "live = (queries >= first) & (queries < last + 64)",
    ),
    Bug(
        "sequence starts forgotten",
        "operands/layout.py",
        "return tl.load(cu + b).to(tl.int64)",
        "return tl.load(cu + b).to(tl.int64) * 0",
    ),
    Bug(
        "codes of packed sequences overlap",
        "operands/layout.py",
        "return (tl.load(cu + b).to(tl.int64) // ALIGNMENT + b) * ALIGNMENT",
        "return (tl.load(cu + b).to(tl.int64) // ALIGNMENT) * ALIGNMENT",
    ),
    Bug(
        "another mean of K is saved",
        "dispatch.py",
        "else operands.k_mean.ptr)",
        "else operands.k_mean.ptr * 1.5)",
    ),
    Bug(
        "storage ends in what was there",
        "operands/casting.py",
        "last = tl.cdiv(last, ALIGNMENT) * ALIGNMENT",
        "last += 0",
    ),
    Bug(
        "one lse for all sequences",
        "operands/layout.py",
        "rows.ptr + b.to(tl.int64) * rows.stride_b + h",
        "rows.ptr + h",
    ),
    Bug(
        "the dropped argument: dropout_p ignored",
        "api.py",
        "if isinstance(dropout_p, Tensor) or dropout_p != 0.0:",
        "if False:",
    ),
    Bug(
        "autocast ignored",
        "api.py",
        "q, k, v = autocast(q, k, v)",
        "q, k, v = q, k, v",
        3,
    ),
)


def bugs_of(name: str, test_file: str) -> tuple[Bug, ...]:
    """Return the bugs of a file beside this script. test_file: has the tests that they name."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return tuple(Bug(**fields, test_file=test_file) for fields in tomllib.loads(text)["bug"])


_OF_AMPERE, _OF_PREPARATION, _OF_HOPPER, _OF_CODES, _OF_FORWARD_CODES, _OF_OPERANDS = (
    f"tests/sagesim_kernels/{name}.py"
    for name in (
        "ampere/test_on_cpu",
        "preparation/test_one_pass",
        "hopper/test_in_16_bit",
        "hopper/test_codes",
        "hopper/test_forward_codes",
        "hopper/test_codes_operands",
    )
)

AMPERE_BUGS = (
    *bugs_of("ampere_bugs.toml", _OF_AMPERE),
    *bugs_of("preparation_bugs.toml", _OF_PREPARATION),
)
"""Bugs of the kernels for mma.sync, and of those that prepare operands for them and for Hopper's.
Tests run them on the CPU."""

HOPPER_BUGS = (
    *bugs_of("hopper_bugs.toml", _OF_HOPPER),
    *bugs_of("hopper_codes_bugs.toml", _OF_CODES),
    *bugs_of("hopper_forward_codes_bugs.toml", _OF_FORWARD_CODES),
    *bugs_of("hopper_operands_bugs.toml", _OF_OPERANDS),
)
"""Bugs of the kernels for Hopper. They need a GPU."""


@dataclass(frozen=True)
class Plan:
    """Bugs, and the tests that should notice them."""

    bugs: tuple[Bug, ...]
    tests: list[str]
    marked: str  #: pytest's expression for the tests' marks
    record: Path
    option: str = ""
    seconds: int | None = None  #: that the tests of a bug may take; None: no limit

    def limit(self, bug: Bug | None, tests: list[str]) -> int | None:
        """Return the seconds that these tests may take with a bug, or without one.

        A part of the tests without a bug may be most of the plan's tests.
        """
        if self.seconds is None or bug is not None:
            return self.seconds
        return self.seconds * len(tests)


INTERPRETED = Plan(BUGS, TESTS, "not gpu", DATA / "mutations.json")
AMPERE = Plan(
    AMPERE_BUGS,
    [_OF_AMPERE, _OF_PREPARATION],
    "not gpu",
    DATA / "mutations_ampere.json",
    " --ampere",
)
HOPPER = Plan(
    HOPPER_BUGS,
    [_OF_HOPPER, _OF_CODES, _OF_FORWARD_CODES, _OF_OPERANDS],
    "gpu",
    DATA / "mutations_hopper.json",
    " --hopper",
    seconds=240,
)


def named_tests(bugs: Sequence[Bug]) -> list[str]:
    """Return the tests that bugs name, each once."""
    return list(dict.fromkeys(f"{bug.test_file}::{test}" for bug in bugs for test in bug.tests))


def controls(
    bugs: Sequence[Bug], plan: Plan, parts: int, clean: Sequence[str] = ()
) -> list[list[str]]:
    """Return the tests to run without a bug, in parts: those that bugs name, or all of the plan.

    clean: tests that have passed without a bug.
    """
    if not bugs:
        return []
    named = [test for test in named_tests(bugs) or plan.tests if test not in clean]
    if plan is INTERPRETED:
        return [named] if named else []
    return [named[i::parts] for i in range(min(parts, len(named)))]


def run(bug: Bug | None, plan: Plan, tests: list[str]) -> dict[str, object]:
    """Run tests with this bug, or without one; report whether they fail."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, root / name, ignore=ignored)
            else:
                shutil.copy(source, root / name)
        if bug is not None:
            path = root / KERNELS / bug.file
            text = path.read_text(encoding="utf-8")
            if text.count(bug.old) != bug.times:
                raise SystemExit(
                    f"{bug.name}: {text.count(bug.old)} places in {bug.file}, not {bug.times}"
                )
            path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
        if (ROOT / ".venv").exists():  # it has the oldest Triton, with which tests compile
            (root / ".venv").symlink_to(ROOT / ".venv")
        start = time.perf_counter()
        failed = first_failure(root, plan, tests, plan.limit(bug, tests))
        seconds = time.perf_counter() - start
    return {
        "name": "none" if bug is None else bug.name,
        "file": "" if bug is None else bug.file,
        "caught": failed is not None,
        "by": failed or "",
        "seconds": round(seconds, 1),
        "commit": commit(),
    }


@cache
def commit() -> str:
    """Return the commit of this checkout, with a + if what is copied differs; "" outside of git."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if found.returncode:
        return ""
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *COPIED]).returncode
    return found.stdout.strip() + ("+" if differs else "")


def first_failure(root: Path, plan: Plan, tests: list[str], limit: int | None) -> str | None:
    """Return the first of these tests that fails in a copy of the checkout; None if all pass.

    limit: seconds that they may take, or None.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-m", plan.marked]
    command += ["-p", "no:cacheprovider", "--hypothesis-profile=unshrunk", *tests]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        result = subprocess.run(
            command,
            cwd=root,
            env=env | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit} s"  # a kernel may wait for ever
    if result.returncode == _NO_SUCH_TEST and set(plan.tests) < set(tests):
        return first_failure(root, plan, plan.tests, limit)
    lines = result.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if bool(failed) != (result.returncode != 0):
        raise SystemExit(f"pytest itself failed:\n{result.stdout}{result.stderr}")
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else None


def show(record: Path) -> None:
    """Print a recorded run: each bug, its file, and the first test that failed."""
    data = json.loads(record.read_text())
    rows = [("bug", "file", "first test that failed")]
    rows += [(b["name"], b["file"], b["by"] if b["caught"] else "MISSED") for b in data["bugs"]]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for name, file, test in rows:
        print(f"{name:{widths[0]}}  {file:{widths[1]}}  {test}")
    print(f"{data['caught']} of {len(data['bugs'])} planted bugs caught on {data['machine']}")


def machine(plan: Plan) -> str:
    """Return what the tests ran on."""
    if plan is not HOPPER:
        how = "Triton's interpreter" if plan is INTERPRETED else "PTX of Triton's oldest version"
        return f"CPU ({platform.machine()}), {how}"
    import torch
    import triton

    name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, Triton {triton.__version__}"


def record(plan: Plan, bugs: list[dict[str, object]], clean: list[str]) -> str:
    """Return the record of the bugs that were planted, as JSON.

    clean: tests that passed without a bug.
    """
    head = {
        "command": f"python scripts/mutate.py{plan.option}",
        "machine": machine(plan),
        "caught": sum(bool(b["caught"]) for b in bugs),
        "passed_without_a_bug": clean,
        "bugs": bugs,
    }
    return json.dumps(head, indent=1) + "\n"


def continued(path: Path) -> tuple[dict[str, dict[str, object]], list[str]]:
    """Return the bugs of an existing record by name, and the tests that passed without a bug.

    Raises:
        Failure: if the file is not a record of this script.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failure(f"--out {path}: cannot be read as JSON: {error}") from None
    bugs = data.get("bugs") if isinstance(data, dict) else None
    if not isinstance(bugs, list) or not all(isinstance(b, dict) and "name" in b for b in bugs):
        raise Failure(f"--out {path}: not a record of mutate.py: no list of bugs with names")
    return {b["name"]: b for b in bugs}, data.get("passed_without_a_bug", [])


def chosen_by(words: Sequence[str] | None, plan: Plan) -> list[Bug]:
    """Return the bugs of a plan whose name contains one of the words; all if there are no words.

    Raises:
        Failure: if no name contains one of the words.
    """
    for word in words or ():
        if not any(word in bug.name for bug in plan.bugs):
            raise Failure(f"--only {word!r}: no name of the {len(plan.bugs)} bugs contains it")
    return [bug for bug in plan.bugs if not words or any(word in bug.name for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--show", action="store_true", help="print the recorded run and run nothing"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--ampere", action="store_true", help="bugs of the kernels for mma.sync")
    kind.add_argument("--hopper", action="store_true", help="bugs of the kernels for Hopper")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="bugs whose name contains one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="continue the record of --out")
    args = parser.parse_args()
    plan = AMPERE if args.ampere else HOPPER if args.hopper else INTERPRETED
    if args.show:
        if not plan.record.exists():
            raise SystemExit(f"{plan.record.relative_to(ROOT)} does not exist: no run is recorded")
        show(plan.record)
        return 0
    if args.add and not args.out:
        parser.error("--add needs --out")
    if args.jobs < 1:
        raise Failure(f"--jobs {args.jobs}: not a positive number")
    wanted = chosen_by(args.only, plan)
    planted: dict[str, dict[str, object]] = {}
    clean: list[str] = []
    if args.out and args.out.exists():
        if not args.add:
            raise Failure(f"--out {args.out}: it exists; --add continues it")
        planted, clean = continued(args.out)
    if args.out:
        check_writable(args.out)
    chosen = [b for b in wanted if b.name not in planted]
    parts = controls(wanted, plan, args.jobs, clean)
    if args.add and not chosen:
        tests = "their tests run without a bug" if parts else "so are their tests without a bug"
        print(f"all of these bugs are recorded in {args.out}; {tests}")
    caught_by = {}
    if plan.record.exists():
        recorded = json.loads(plan.record.read_text())["bugs"]
        caught_by = {b["name"]: b["by"] for b in recorded if b["by"]}

    def result_of(bug: Bug) -> dict[str, object]:
        known = [caught_by[bug.name]] if bug.name in caught_by else []
        return run(bug, plan, named_tests([bug]) or [*known, *plan.tests])

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        of_bugs = [pool.submit(result_of, bug) for bug in chosen]
        of_none = {pool.submit(run, None, plan, part): part for part in parts}
        for run_of in concurrent.futures.as_completed([*of_bugs, *of_none]):
            done = [each.result() for each in of_bugs if each.done() and not each.exception()]
            planted |= {str(b["name"]): b for b in done}
            bugs = [planted[b.name] for b in plan.bugs if b.name in planted]
            if run_of in of_none and not run_of.exception() and not run_of.result()["caught"]:
                clean += of_none[run_of]
            if args.out:
                write_text(args.out, record(plan, bugs, clean))
            result = run_of.result()
            word = "caught" if result["caught"] else "MISSED"
            if result["name"] == "none":
                word = "FAIL" if result["caught"] else "pass"
            print(
                f"{word:7} {result['seconds']:>6} s  {result['name']}  {result['by']}", flush=True
            )
    bugs = [planted[b.name] for b in plan.bugs if b.name in planted]
    caught = sum(bool(b["caught"]) for b in bugs)
    print(f"{caught} of {len(bugs)} planted bugs caught")
    is_clean = not any(run_of.result()["caught"] for run_of in of_none)
    return 0 if is_clean and caught >= 0.95 * len(bugs) else 1


if __name__ == "__main__":
    sys.exit(exit_code("mutate.py", main, {}))
