"""Run every kernel on small problems, under compute-sanitizer.

for tool in memcheck racecheck synccheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool python scripts/sanitize.py
done

Most of the time goes into compiling. To compile in several processes first:

for part in 0 1 2 3 4 5 6 7; do python scripts/sanitize.py --part $part/8 & done; wait

With --code sm80, kernels are compiled as for an A100 GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from itertools import product
from typing import Any, Final

import torch

import sagesim_kernels
from sagesim import AttentionSpec
from sagesim.command import exit_code
from sagesim.terminal import Failure
from sagesim_kernels.bench.foreign_target import CODES, compile_for

LABELS = (
    "sagebwd",
    "factored",
    "factored_qk",
    "fpa_fp16",
    "sagebwd_all_int8 smooth=qk",
    "factored smooth=q round=stochastic@7 block=32x128",
)
SHAPES = (
    # heads, kv heads, n_q, n_k, d, causal
    (1, 1, 1, 1, 8, False),
    (2, 1, 65, 130, 40, True),
    (2, 2, 130, 65, 64, True),
    (1, 1, 129, 100, 128, False),
    (1, 1, 70, 70, 256, True),
)
MANY_STEPS = ((1, 1, 1600, 130, 128, False), (1, 1, 3200, 70, 80, True))
"""Shapes whose tiles of keys have many steps, for which Hopper has a backward of its own."""
DTYPES = (torch.float16, torch.bfloat16)

N_Q, N_K = 130, 200
"""Queries and keys of the calls with OPTIONS. Neither is a multiple of a tile."""

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "causal window": {"window": (40, -1), "is_causal": True, "causal_alignment": "lower_right"},
    "window": {"window": (40, 70), "causal_alignment": "upper_left"},
    "key mask": {"key_mask": torch.arange(N_K)[None] % 3 > 0},
    "lengths": {"seqused_k": torch.tensor([150])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0]), "is_causal": True},
    "softcap": {"softcap": 2.0},
}
OPTION_LABELS = ("sagebwd", "factored_qk", "fp8_gradients")
OPTION_HEAD_SIZES = (64, 128)

Problem = tuple[str, tuple[int, ...], torch.dtype, dict[str, Any]]


def problems() -> list[Problem]:
    """Return label, shape, dtype and further arguments of each call."""
    found: list[Problem] = []
    for number, (label, shape) in enumerate(product(LABELS, SHAPES)):
        found.append((label, shape, DTYPES[number % 2], {}))
    for dtype, shape in zip(DTYPES, MANY_STEPS, strict=True):
        found.append(("factored_qk", shape, dtype, {}))
    for number, (label, options) in enumerate(product(OPTION_LABELS, OPTIONS.values())):
        d = OPTION_HEAD_SIZES[(number + number // len(OPTIONS)) % 2]
        found.append((label, (2, 1, N_Q, N_K, d, False), torch.bfloat16, options))
    return found


def run(number: int, problem: Problem) -> None:
    label, (heads, kv_heads, n_q, n_k, d, causal), dtype, options = problem
    torch.manual_seed(number)
    q = torch.randn(1, heads, n_q, d, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, kv_heads, n_k, d, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    arguments: dict[str, Any] = {
        "is_causal": bool(causal),
        "causal_alignment": "lower_right" if number % 3 == 0 else "upper_left",
    }
    for name, value in options.items():
        arguments[name] = value.cuda() if isinstance(value, torch.Tensor) else value
    o = sagesim_kernels.attention(
        q, k, v, spec=AttentionSpec.parse(label), enable_gqa=True, **arguments
    )
    o.float().square().sum().backward()
    grads = (q.grad, k.grad, v.grad)
    assert all(g is not None and bool(g.isfinite().all()) for g in grads), (number, problem)


def part_of(text: str) -> tuple[int, int]:
    """Read I/N.

    Raises:
        Failure: if it is not the number of a part and the number of parts.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    first, parts = map(int, found.groups()) if found else (0, 0)
    if first >= parts:
        raise Failure(f"--part {text}: not I/N with I from 0 to N - 1")
    return first, parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="run every Nth problem, from the Ith on"
    )
    parser.add_argument("--code", choices=CODES, help="compile as for another GPU")
    args = parser.parse_args()
    first, parts = part_of(args.part)
    if args.code is not None:
        compile_for(args.code)
    some = list(enumerate(problems()))[first::parts]
    for number, problem in some:
        run(number, problem)
    print(f"{len(some)} configurations")


if __name__ == "__main__":
    sys.exit(exit_code("sanitize.py", main, {}))
