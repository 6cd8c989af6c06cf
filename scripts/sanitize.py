"""Run every kernel on sixty small problems, under compute-sanitizer.

for tool in memcheck racecheck initcheck synccheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool python scripts/sanitize.py
done

Most of the time goes into compiling. To compile in several processes first:

for part in 0 1 2 3 4 5 6 7; do python scripts/sanitize.py --part $part/8 & done; wait
"""

from __future__ import annotations

import argparse
import itertools

import torch

import sagesim_kernels
from sagesim import AttentionSpec

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
DTYPES = (torch.float16, torch.bfloat16)


def run(number: int, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    heads, kv_heads, n_q, n_k, d, is_causal = shape
    torch.manual_seed(number)
    q = torch.randn(1, heads, n_q, d, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, kv_heads, n_k, d, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    o = sagesim_kernels.attention(
        q,
        k,
        v,
        spec=AttentionSpec.parse(label),
        is_causal=bool(is_causal),
        causal_alignment="lower_right" if number % 3 == 0 else "upper_left",
        enable_gqa=True,
    )
    o.float().square().sum().backward()
    grads = (q.grad, k.grad, v.grad)
    assert all(g is not None and bool(g.isfinite().all()) for g in grads), (label, shape, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="run every Nth problem, from the Ith on"
    )
    first, parts = map(int, parser.parse_args().part.split("/"))
    all_of_them = list(enumerate(itertools.product(LABELS, SHAPES, DTYPES)))
    some = all_of_them[first::parts]
    for number, configuration in some:
        run(number, *configuration)
    print(f"{len(some)} configurations")


if __name__ == "__main__":
    main()
