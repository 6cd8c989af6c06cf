"""Measure what a GPU loses in sums of FP8 products, and compare it with `theory.fp8_sums`.

    python scripts/fp8_sums.py [--lengths N ...]

Needs a GPU with FP8 tensor cores (compute capability 8.9 or newer) and Triton. For each length it
computes 64 columns of P^T dO, as dV has them, in one Triton kernel: without promotion, with
promotion every 256 queries, and in INT8. It prints the relative L2 error against float64, and the
share of the results that equal the model's bits.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from theory.fp8_sums import ADA, BLACKWELL, HOPPER, Instruction, tensor_core_sum

KEYS, CHANNELS, STEP, PROMOTE = 64, 64, 128, 256
BIASES = (0.0, 0.25, 4.0)
_MODELS = {8: ADA, 9: HOPPER, 10: BLACKWELL, 12: BLACKWELL}


@triton.jit
def _sum(
    left: Any,
    right: Any,
    out: Any,
    n: int,
    promote: tl.constexpr,
    step: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """out [rows, columns] = left [rows, n] right [columns, n]^T, of FP8 codes.

    promote: terms after which a sum begins anew; 0 is never.
    """
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    term = tl.arange(0, step)
    total = tl.zeros((rows, columns), tl.float32)
    part = tl.zeros((rows, columns), tl.float32)
    for start in range(0, n, step):
        a = tl.load(left + row * n + start + term[None, :])
        b = tl.load(right + column * n + start + term[:, None])
        part = tl.dot(a, b, part, max_num_imprecise_acc=2**30)
        if promote > 0 and (start + step) % promote == 0:
            total += part
            part = tl.zeros((rows, columns), tl.float32)
    tl.store(out + row * columns + column, total + part)


def on_gpu(left: Tensor, right: Tensor, promote: int) -> Tensor:
    """The sums of FP8 codes [KEYS, n] and [CHANNELS, n] on the GPU, float64 [KEYS, CHANNELS]."""
    codes = [x.to(torch.float8_e4m3fn).cuda().contiguous() for x in (left, right)]
    out = torch.empty(KEYS, CHANNELS, device="cuda")
    n = left.shape[-1]
    _sum[(1,)](*codes, out, n, promote, STEP, KEYS, CHANNELS, num_warps=4)
    return out.cpu().double()


def codes(n: int, bias: float) -> tuple[Tensor, Tensor]:
    """FP8 codes of P^T [KEYS, n] and of dO^T [CHANNELS, n], float64; dO has mean `bias`."""
    generator = torch.Generator().manual_seed(n)
    p = torch.exp(torch.randn(KEYS, n, generator=generator))
    do = torch.randn(CHANNELS, n, generator=generator) + bias
    left, right = ((x * (448 / x.amax())).to(torch.float8_e4m3fn).double() for x in (p, do))
    return left, right


def in_int8(left: Tensor, right: Tensor) -> Tensor:
    """The same sums of INT8 codes, in int32 on the GPU; its error is that of the codes alone."""
    a, b = (torch.round(x * (127 / x.abs().amax())) for x in (left, right))
    found = torch._int_mm(a.to(torch.int8).cuda(), b.to(torch.int8).cuda().T.contiguous())
    exact = a @ b.T
    return (found.cpu().double() - exact).norm() / exact.norm()


def report(n: int, bias: float, model: Instruction) -> None:
    """Print a line for one length and one mean of dO."""
    left, right = codes(n, bias)
    exact = left @ right.T
    line = f"{n:8} {bias:6.2f}"
    for promote in (0, PROMOTE):
        found = on_gpu(left, right, promote)
        some = slice(0, 4)  # the model of all columns would take long
        modelled = tensor_core_sum(
            left[some, None], right[None, some], model, promote=promote or None
        )
        same = (found[some, some] == modelled).double().mean()
        line += f" {float((found - exact).norm() / exact.norm()):10.5f} {float(same):8.1%}"
    print(line, f"{float(in_int8(left, right)):8.1g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384, 65536, 131072]
    )
    args = parser.parse_args()
    if any(n < PROMOTE or n % PROMOTE for n in args.lengths):
        parser.error(f"lengths are multiples of {PROMOTE}")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        sys.exit(f"compute capability {major}.{minor} has no FP8 tensor cores")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print("       n   bias      never  = model  every 256  = model     INT8")
    for bias in BIASES:
        for n in args.lengths:
            report(n, bias, _MODELS[major])


if __name__ == "__main__":
    main()
