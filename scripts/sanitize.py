"""Sixty small problems through every kernel, for compute-sanitizer to watch.

for tool in memcheck racecheck initcheck synccheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool python scripts/sanitize.py
done
"""

from __future__ import annotations

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


def main() -> None:
    count = 0
    for label, shape, dtype in itertools.product(LABELS, SHAPES, DTYPES):
        heads, kv_heads, n_q, n_k, d, is_causal = shape
        torch.manual_seed(count)
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
            is_causal=is_causal,
            causal_alignment="lower_right" if count % 3 == 0 else "upper_left",
            enable_gqa=True,
        )
        o.float().square().sum().backward()
        grads = (q.grad, k.grad, v.grad)
        assert all(g is not None and bool(g.isfinite().all()) for g in grads), (label, shape, dtype)
        count += 1
    print(f"{count} configurations")


if __name__ == "__main__":
    main()
