"""Plant realistic bugs in the kernels, one at a time, and see whether the tests notice.

    python scripts/mutate.py [--jobs N] [--only NAME ...] [--out FILE.json]

Each bug is one replacement in a copy of the checkout. The kernels' tests run there until the first
failure. Exits 1 if fewer than 95 % of the bugs are caught, or if the tests fail without any.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = "sagesim_kernels"
COPIED = ("sagesim", KERNELS, "tests", "pyproject.toml", "README.md")
TESTS = [
    f"tests/kernels/test_{name}.py"
    for name in ("fuzz", "operands", "varlen", "attention", "invariance", "compile", "support")
]


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` wherever it stands in the file, which must be `times` times."""

    name: str
    file: str
    old: str
    new: str
    times: int = 1


BUGS = (
    # scales
    Bug(
        "a scale of 127.5",
        "primitives.py",
        "code_max = tl.full(amax.shape, 127.0",
        "code_max = tl.full(amax.shape, 127.5",
    ),
    Bug(
        "an absolute epsilon in the scale",
        "primitives.py",
        "scale = tl.math.div_rn(amax, code_max)",
        "scale = tl.math.div_rn(amax, code_max) + 1e-7",
    ),
    Bug(
        "scale is the reciprocal of the inverse",
        "primitives.py",
        "scale = tl.math.div_rn(amax, code_max)",
        "scale = tl.math.div_rn(amax * 0 + 1.0, tl.math.div_rn(code_max, amax))",
    ),
    Bug(
        "zero regions divide by zero",
        "primitives.py",
        "vanishing = amax <= _VANISHING",
        "vanishing = amax < 0.0",
    ),
    Bug(
        "amax of x, not of |x|",
        "primitives.py",
        "return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF",
        "return tl.maximum(x, 0.0).to(tl.int32, bitcast=True)",
    ),
    Bug(
        "channel scales along tokens",
        "quantize.py",
        "scale_and_inverse(tl.max(size, 0)[None, :])",
        "scale_and_inverse(tl.max(tl.max(size, 0), 0) + tl.zeros((1, D_PAD), tl.int32))",
    ),
    Bug(
        "scales of the next block of keys",
        "operands.py",
        "ptr = base + tl.cast(first // x.TOKENS, tl.int64) * x.scale_stride_n",
        "ptr = base + tl.cast(tl.maximum(first // x.TOKENS - 1, 0), tl.int64) * x.scale_stride_n",
    ),
    Bug(
        "row scales swapped for the tile's first",
        "operands.py",
        "return base + (row // x.TOKENS)",
        "return base + (0 * row + tl.min(row, 0) // x.TOKENS)",
    ),
    Bug(
        "K's scales of tokens forgotten",
        "operands.py",
        "return s * k_scale, factor",
        "return s, factor",
    ),
    Bug(
        "K's scales of blocks forgotten",
        "operands.py",
        "return s, factor * k_scale",
        "return s, factor",
    ),
    Bug(
        "K's scale of the first block, forward",
        "forward.py",
        "load_block_scales(k, k_scales, key, BLOCK_K)",
        "load_block_scales(k, k_scales, 0, BLOCK_K)",
    ),
    Bug(
        "K's scale of the first block, dQ",
        "query_tiles.py",
        "load_block_scales(k, k_scales, key, BLOCK_K)",
        "load_block_scales(k, k_scales, 0, BLOCK_K)",
    ),
    Bug(
        "K's scale of the first block, dK and dV",
        "key_tiles.py",
        "load_token_scales(k, k_scales, first, TILE, n_k)",
        "load_token_scales(k, k_scales, 0, TILE, n_k)",
    ),
    Bug(
        "one scale for all tokens of a block",
        "operands.py",
        "elif count == x.TOKENS:",
        "elif True:",
    ),
    Bug("one scale for a tile of P and dS", "maps.py", "if PER_TILE:", "if True:"),
    Bug("a scale per row where the tile has one", "maps.py", "if PER_TILE:", "if False:"),
    Bug(
        "channel scale forgotten in a product of maps",
        "maps.py",
        "return tl.fma(sums, scale * channel_scale[None, :], total)",
        "return total + sums * scale",
    ),
    Bug("V's scale forgotten", "forward.py", "weight[:, None] * v_scale", "weight[:, None]"),
    # rounding
    Bug(
        "codes are cut off, not rounded",
        "primitives.py",
        "return (y + _INTEGER_GRID).to(tl.int32, bitcast=True).to(tl.int8)",
        "return y.to(tl.int8)",
    ),
    Bug(
        "ties away from zero in half-even",
        "primitives.py",
        "if rounding.MODE == _HALF_EVEN:",
        "if False:",
    ),
    Bug(
        "ties to even in half-away",
        "primitives.py",
        "elif rounding.MODE == _HALF_AWAY:",
        "elif False:",
    ),
    Bug(
        "random numbers of the tile, not of the head",
        "quantize.py",
        "codes = to_codes(tokens * inverse, (i * BLOCK + local)[:, None]",
        "codes = to_codes(tokens * inverse, local[:, None]",
    ),
    Bug(
        "one stream of random numbers for all tensors",
        "primitives.py",
        "tl.constexpr(STREAMS[tensor])",
        "tl.constexpr(0)",
    ),
    # smoothing
    Bug(
        "K mean over all heads",
        "smoothing.py",
        "row = (b.to(tl.int64) * means.heads + h) * means.means + index",
        "row = b.to(tl.int64) * means.heads * means.means + index",
    ),
    Bug(
        "K mean divided by the padded length",
        "smoothing.py",
        "tokens = tl.minimum(start + chunks * CHUNK, last) - tl.maximum(start, first)",
        "tokens = tl.cdiv(tl.minimum(start + chunks * CHUNK, last), 64) * 64 - start",
    ),
    Bug(
        "K mean over keys that nobody sees",
        "smoothing.py",
        "return tl.cast(0, tl.int32), live_keys(lengths, b)",
        "return tl.cast(0, tl.int32), lengths.n_k",
    ),
    Bug(
        "padding is smoothed into -mean",
        "quantize.py",
        "tokens = tl.where(mask, tokens - mean_of(mean, b, h, index, D, D_PAD), 0.0)",
        "tokens = tokens - mean_of(mean, b, h, index, D, D_PAD)",
    ),
    Bug(
        "bias of smoothed Q dropped from S",
        "forward.py",
        "s = s * factor[:, None] + bias[None, :] * scale_log2",
        "s = s * factor[:, None] + bias[None, :] * 0.0",
    ),
    Bug(
        "bias branch of dK dropped",
        "key_tiles.py",
        "dk_total += tl.sum(ds, 1)[:, None] * mean",
        "dk_total += tl.sum(ds, 1)[:, None] * mean * 0.0",
    ),
    Bug(
        "bias of the first query block everywhere",
        "key_tiles.py",
        "block = query // BLOCK_Q",
        "block = 0",
    ),
    Bug("lse without the shift of K", "lse.py", "result += shift * scale", "result += 0.0"),
    Bug("lse shift unscaled", "lse.py", "result += shift * scale", "result += shift"),
    # softmax and masks
    Bug(
        "causal mask off by one, forward",
        "forward.py",
        "visible = sees(queries[:, None], keys[None, :], n_k",
        "visible = sees(queries[:, None] - 1, keys[None, :], n_k",
    ),
    Bug(
        "causal mask off by one, dK and dV",
        "key_tiles.py",
        "visible = sees(queries, keys, n_k",
        "visible = sees(queries + 1, keys, n_k",
    ),
    Bug(
        "causal mask off by one, dQ",
        "query_tiles.py",
        "visible = sees(queries[:, None], keys[None, :], n_k",
        "visible = sees(queries[:, None] + 1, keys[None, :], n_k",
    ),
    Bug(
        "causal loop ends a tile early",
        "layout.py",
        "tl.minimum(n_k, first + TILE + offset)",
        "tl.minimum(n_k, first + offset + 1)",
    ),
    Bug(
        "causal loop begins a block late",
        "layout.py",
        "by_any = tl.maximum(first_live, first - offset)",
        "by_any = tl.maximum(first_live, first - offset + BLOCK)",
    ),
    Bug(
        "tiles on the diagonal taken for whole",
        "layout.py",
        "by_all = tl.maximum(tl.minimum(n_k, first + offset + 1), 0)",
        "by_all = tl.maximum(tl.minimum(n_k, first + offset + BLOCK), 0)",
    ),
    Bug(
        "tiles on the diagonal taken for whole, dK and dV",
        "layout.py",
        "by_all = tl.maximum(first_live, first + TILE - 1 - offset)",
        "by_all = tl.maximum(first_live, first - offset)",
    ),
    Bug(
        "last tile of keys taken for whole",
        "layout.py",
        "return by_all // BLOCK * BLOCK,",
        "return tl.cdiv(by_all, BLOCK) * BLOCK,",
    ),
    Bug(
        "last tile of keys taken for whole, dK and dV",
        "layout.py",
        "if first + TILE > n_k:",
        "if first > n_k:",
    ),
    Bug(
        "loop over whole tiles dropped",
        "key_tiles.py",
        "in tl.static_range(1, -1, -1):",
        "in tl.static_range(1, 0, -1):",
    ),
    Bug(
        "least of negative logits taken for the largest",
        "forward.py",
        "s = -s",
        "s = s",
    ),
    Bug(
        "-inf times a scale of 0",
        "forward.py",
        's = tl.where(visible, s * factor[:, None], -float("inf"))',
        's = tl.where(visible, s, -float("inf")) * factor[:, None]',
    ),
    Bug(
        "keys behind the last not masked",
        "layout.py",
        "return (keys < n_k) & (keys <= queries + offset)",
        "return keys <= queries + offset",
    ),
    Bug("lower right aligned as upper left", "layout.py", "if lengths.LOWER_RIGHT:", "if False:"),
    Bug(
        "old maximum not rescaled",
        "forward.py",
        "tl.fma(sums, weight[:, None] * v_scale, total * shrink[:, None])",
        "tl.fma(sums, weight[:, None] * v_scale, total)",
    ),
    Bug(
        "row sum not rescaled",
        "forward.py",
        "row_sum = row_sum * shrink + tl.sum(p, 1) * weight",
        "row_sum = row_sum + tl.sum(p, 1) * weight",
    ),
    Bug(
        "P codes against the running maximum",
        "forward.py",
        "p = 127.0 * tl.exp2(s * factor[:, None] - _finite(tile_max)[:, None])",
        "p = 127.0 * tl.exp2(s * factor[:, None] - _finite(new_max)[:, None])",
    ),
    Bug(
        "rows without keys are NaN",
        "forward.py",
        'return tl.where(x == -float("inf"), 0.0, x)',
        "return x",
    ),
    Bug("lse in the wrong base", "lse.py", "result = row_lse2 * _LN_2", "result = row_lse2"),
    Bug(
        "empty rows get P = inf",
        "forward.py",
        'row_lse2 = tl.where(row_max == -float("inf"), float("inf"), row_lse2)',
        "row_lse2 += 0.0",
    ),
    # gradients
    Bug("dQ not scaled", "query_tiles.py", "n_q, total * scale, D)", "n_q, total, D)"),
    Bug(
        "dK not scaled", "key_tiles.py", "n_stored, dk_total * scale, D)", "n_stored, dk_total, D)"
    ),
    Bug(
        "1/sqrt(d) of the padded head",
        "problem.py",
        "1 / math.sqrt(q.shape[-1])",
        "1 / math.sqrt(padded(q.shape[-1]))",
    ),
    Bug(
        "delta forgotten in dK",
        "key_tiles.py",
        "ds = p * (dp - load_rows(delta, lengths.cu_q, b, h, row, n_q, 0.0)[None, :])",
        "ds = p * dp",
    ),
    Bug(
        "delta from O where it is from P",
        "backward.py",
        "if spec.delta is Delta.FROM_P:",
        "if False:",
    ),
    Bug(
        "delta from P where it is from O",
        "backward.py",
        "if spec.delta is Delta.FROM_P:",
        "if True:",
    ),
    Bug(
        "gradient of lse dropped",
        "delta.py",
        "result -= load_rows(d_lse, lengths.cu_q, b, h, queries, n_q, 0.0)",
        "result -= 0.0",
    ),
    Bug(
        "mean of K dropped from the gradient of lse",
        "query_tiles.py",
        'tl.where((row_lse2 < float("inf"))[:, None], gain * mean, 0.0)',
        "0.0 * gain * mean",
    ),
    Bug(
        "qk_recompute takes qk's codes",
        "backward.py",
        'operands.at("qk_recompute", "q")',
        'operands.at("qk", "q")',
    ),
    Bug(
        "dV takes dp's dO",
        "backward.py",
        "do_right is dp_operands[0],",
        "True,",
    ),
    Bug("dp reads dv's dO", "backward.py", 'operands.at("dp", "do")', 'operands.at("dv", "do")'),
    # layout
    Bug(
        "stale stride: dO taken for contiguous",
        "backward.py",
        "Operands(problem, do, ",
        "Operands(problem, do.as_strided(do.shape, torch.empty(do.shape).stride()), ",
    ),
    Bug(
        "query heads grouped by remainder",
        "forward.py",
        "k_head = h // GROUPS",
        "k_head = h % (grid.heads // GROUPS)",
    ),
    Bug(
        "last head of a group dropped",
        "key_tiles.py",
        "range(k_head * GROUPS, (k_head + 1) * GROUPS)",
        "range(k_head * GROUPS, (k_head + 1) * GROUPS - (GROUPS > 1))",
    ),
    Bug(
        "load without other, beyond the last channel",
        "operands.py",
        "valid = valid[:, None] & (tl.arange(0, D_PAD) < x.CHANNELS)[None, :]",
        "valid = valid[:, None]",
    ),
    Bug(
        "codes behind the last channel are not written",
        "quantize.py",
        "tl.store(ptrs, codes, mask=column[None, :] < out.CHANNELS)",
        "tl.store(ptrs, codes, mask=column[None, :] < D)",
    ),
    Bug(
        "garbage of packed neighbours in amax",
        "quantize.py",
        "mask = ((row >= first) & (row < last))[:, None]",
        "mask = ((row >= first) & (row < last + BLOCK))[:, None]",
    ),
    Bug(
        "sequence starts forgotten",
        "layout.py",
        "return tl.load(cu + b).to(tl.int64)",
        "return tl.load(cu + b).to(tl.int64) * 0",
    ),
    Bug(
        "codes of packed sequences overlap",
        "layout.py",
        "return (tl.load(cu + b).to(tl.int64) // ALIGNMENT + b) * ALIGNMENT",
        "return (tl.load(cu + b).to(tl.int64) // ALIGNMENT) * ALIGNMENT",
    ),
    Bug(
        "another mean of K is saved",
        "forward.py",
        "operands.k_mean.ptr",
        "operands.k_mean.ptr * 1.5",
    ),
    Bug(
        "storage ends in what was there",
        "quantize.py",
        "last = tl.cdiv(last, ALIGNMENT) * ALIGNMENT",
        "last += 0",
    ),
    Bug(
        "one lse for all sequences",
        "layout.py",
        "rows.ptr + b.to(tl.int64) * rows.stride_b + h",
        "rows.ptr + h",
    ),
    Bug("the dropped argument: dropout_p ignored", "api.py", "if dropout_p != 0.0:", "if False:"),
    Bug(
        "autocast ignored",
        "api.py",
        "q, k, v = autocast(q, k, v)",
        "q, k, v = q, k, v",
        2,
    ),
)


def run(bug: Bug | None, tests: list[str]) -> dict[str, object]:
    """Whether the tests fail with this bug, and the first that does."""
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
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu"]
        command += ["-p", "no:cacheprovider", "--hypothesis-profile=unshrunk", *tests]
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        result = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if result.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest itself failed:\n{result.stdout}{result.stderr}")
    return {
        "name": "none" if bug is None else bug.name,
        "file": "" if bug is None else bug.file,
        "caught": result.returncode != 0,
        "by": failed[0].split(" - ")[0].split(" ", 1)[1] if failed else "",
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="bugs whose name contains one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = [b for b in BUGS if not args.only or any(word in b.name for word in args.only)]
    found: list[dict[str, object]] = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(lambda bug: run(bug, TESTS), [None, *chosen]):
            word = "caught" if result["caught"] else "MISSED"
            if result["name"] == "none":
                word = "FAIL" if result["caught"] else "pass"
            print(
                f"{word:7} {result['seconds']:>6} s  {result['name']}  {result['by']}", flush=True
            )
            found.append(result)
    clean, bugs = found[0], found[1:]
    caught = sum(bool(b["caught"]) for b in bugs)
    print(f"{caught} of {len(bugs)} planted bugs caught")
    if args.out:
        head = {
            "command": "python scripts/mutate.py",
            "machine": f"CPU ({platform.machine()}), Triton's interpreter",
            "caught": caught,
            "bugs": bugs,
        }
        args.out.write_text(json.dumps(head, indent=1) + "\n")
    return 1 if clean["caught"] or caught < 0.95 * len(bugs) else 0


if __name__ == "__main__":
    sys.exit(main())
