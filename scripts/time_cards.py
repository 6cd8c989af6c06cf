"""Time forward and backward on a Hopper GPU, with our kernels compiled for another capability.

    python scripts/time_cards.py [--code 80] [--out FILE.json]

The kernels are compiled for the capability up to PTX, and assembled for the GPU. They then use the
instructions that a GPU of that capability has, above all mma.sync. --code 90 compiles for Hopper.
Hopper's own kernels are off in both. FlashAttention-2 is PyTorch's and always the same code.

--out replaces the run of the same card and code in the file, and keeps the others. The file that
`scripts/cards.py` reads is docs/data/cards_measured.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SPECS = ("flash", "fpa_bf16", "factored_qk", "sagebwd", "factored_pv16", "factored")
LOOPS = ("forward_kernel", "gradients_kernel", "p_rows_kernel", "backward_kernel")
LOOPS += ("flash_fwd_kernel", "flash_bwd_dq_dk_dv_loop")
"""Parts of the names of the kernels whose instructions are counted."""

SEQUENCES, CHANNELS, TOKENS, ROUNDS = 2, 2048, 4096, 9


def compile_for(capability: int) -> None:
    """Make Triton compile for a capability, and assemble its PTX for this GPU."""
    os.environ["TRITON_OVERRIDE_ARCH"] = f"sm{capability}"
    from triton.backends.nvidia.compiler import CUDABackend

    assemble = CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda self, src, metadata, options, _: assemble(
        self, src, metadata, options, 90
    )


def attend(spec: str, is_causal: bool) -> Callable[..., Any]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import sagesim
    import sagesim_kernels

    if spec != "flash":
        parsed = sagesim.AttentionSpec.parse(spec)
        return lambda q, k, v: sagesim_kernels.attention(q, k, v, spec=parsed, is_causal=is_causal)

    def flash(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return flash


def medians(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, from CUDA events, in turns, with a cold cache and a busy GPU."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in runs}
    flush = torch.empty(64 * 2**20, dtype=torch.int8, device="cuda")
    for round_ in range(ROUNDS + 1):
        for name, run in runs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(8_000_000)  # longer than the host needs to launch everything
            start.record()
            run()
            end.record()
            end.synchronize()
            if round_:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def loops_ms(run: Callable[[], Any]) -> float | None:
    """Milliseconds of the kernels in LOOPS, from a profile; None if there are none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    counted = [e for e in profiled.key_averages() if any(name in e.key for name in LOOPS)]
    total = sum(e.self_device_time_total for e in counted) / 1e3
    return round(total, 4) or None


def panel(head_size: int, is_causal: bool) -> list[dict[str, Any]]:
    """Time all specs at one head size and mask."""
    import torch

    torch.manual_seed(0)
    shape = (SEQUENCES, CHANNELS // head_size, TOKENS, head_size)
    q, k, v, do = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    functions = {spec: attend(spec, is_causal) for spec in SPECS}

    def forward(spec: str) -> Any:
        return functions[spec](*inputs)

    outputs = {spec: forward(spec) for spec in SPECS}

    def backward(spec: str) -> Any:
        return torch.autograd.grad(outputs[spec], inputs, do, retain_graph=True)

    result: list[dict[str, Any]] = [
        {"spec": spec, "head_size": head_size, "is_causal": is_causal} for spec in SPECS
    ]
    for run in (forward, backward):
        times = medians({spec: partial(run, spec) for spec in SPECS})
        for row in result:
            row[f"{run.__name__}_ms"] = round(times[row["spec"]], 4)
            row[f"{run.__name__}_loops_ms"] = loops_ms(partial(run, row["spec"]))
    for row in result:
        print(row, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--code", type=int, default=80)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compile_for(args.code)
    import torch

    from sagesim_kernels.hopper import support

    support.is_hopper = lambda: False
    gpu = torch.cuda.get_device_name()
    run = {
        "card": "H200" if "H200" in gpu else "H100",
        "gpu": gpu,
        "code": args.code,
        "command": f"python scripts/time_cards.py --code {args.code}",
        "sequences": SEQUENCES,
        "channels": CHANNELS,
        "tokens": TOKENS,
        "rows": [row for d in (64, 128) for mask in (False, True) for row in panel(d, mask)],
    }
    if args.out:
        document = json.loads(args.out.read_text()) if args.out.exists() else {"runs": []}
        others = [r for r in document["runs"] if (r["card"], r["code"]) != (run["card"], args.code)]
        about = f"bfloat16, medians of {ROUNDS} rounds, kernels of sagesim_kernels.portable"
        text = json.dumps({"about": about, "runs": [*others, run]}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
