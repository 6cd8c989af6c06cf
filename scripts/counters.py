"""Read hardware counters of the kernels for mma.sync and of FlashAttention-2, with Nsight Compute.

    python scripts/counters.py [--out FILE.json]
    python scripts/counters.py --read FILE.txt ... --machine TEXT [--out FILE.json]

The first form needs a Hopper GPU and ncu. It runs the code of an A100, in bfloat16 without a mask,
and profiles one forward and one backward of each spec and head size, and FlashAttention-2 beside
it. The second form reads what ncu printed before; a file's name is SPEC_HEADSIZE.txt.

A row is one kernel. `tensor`, `shared` and `issue` are shares of the elapsed cycles in which the
tensor cores work, shared memory is read or written, and a scheduler issues an instruction.
`stalls` are the reasons for which a warp was not issued, as shares of all samples.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402

CASES = (("fpa_bf16", 64), ("factored_qk", 64), ("sagebwd", 64), ("fpa_bf16", 128))
SEQUENCES, TOKENS, CHANNELS = 2, 4096, 2048

METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
}
STALL = "smsp__pcsamp_warps_issue_stalled_"
_KERNEL = re.compile(r"^  (?:void )?(?:\w+::)?(\w+)[ <(].*(?:\(\d+, 1, 1\)x|_traits<)")
"""Matches the line of a kernel; ncu cuts long names off."""
_VALUE = re.compile(r"^ +([\w.]+) +(?:[%\w]+ +)?([\d,.]+)$")


def profiled(spec: str, head_size: int) -> None:
    """Run what ncu profiles."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from sagesim import PRESETS
    from sagesim_kernels import attention
    from sagesim_kernels.bench.foreign_target import compile_for

    compile_for("sm80")
    shape = (SEQUENCES, CHANNELS // head_size, TOKENS, head_size)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(attention(q, k, v, spec=PRESETS[spec]), leaves, do)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(q, k, v)
    torch.autograd.grad(o, leaves, do)
    torch.cuda.synchronize()


def profile(spec: str, head_size: int) -> str:
    """Return what ncu prints of one case."""
    kernels = "regex:ampere_forward|ampere_backward|flash_fwd|flash_bwd_dq"
    metrics = ",".join([*METRICS.values(), "group:smsp__pcsamp_warp_stall_reasons"])
    run = [sys.executable, __file__, "--run", spec, str(head_size)]
    subprocess.run(run, check=True)  # compiles, so that ncu does not wait for it
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--clock-control", "none", "--metrics", metrics, "--kernel-name", kernels, *run]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def rows(printed: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel that ncu printed."""
    found: dict[str, float] = {}
    kernel = ""
    for line in printed.splitlines():
        if match := _KERNEL.match(line):
            if found:
                yield _row(kernel, found)
            kernel, found = match[1], {}
        elif match := _VALUE.match(line):
            found[match[1]] = float(match[2].replace(",", ""))
    if found:
        yield _row(kernel, found)


def _row(kernel: str, found: dict[str, float]) -> dict[str, Any]:
    samples = {
        name.removeprefix(STALL): n
        for name, n in found.items()
        if name.startswith(STALL) and not name.endswith("not_issued")
    }
    total = sum(samples.values())
    waiting = {name: n / total for name, n in samples.items() if name != "selected"}
    most = sorted(waiting, key=lambda name: -waiting[name])[:4]
    return {
        "kernel": kernel,
        "cycles": round(found[METRICS["cycles"]]),
        **{key: round(found[METRICS[key]] / 100, 3) for key in ("tensor", "shared", "issue")},
        "stalls": {name: round(waiting[name], 3) for name in most},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE.txt")
    parser.add_argument("--machine", help="of the files that are read")
    parser.add_argument("--run", nargs=2, metavar=("SPEC", "HEADSIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        profiled(args.run[0], int(args.run[1]))
        return
    if (args.read is None) != (args.machine is None):
        parser.error("--read and --machine need each other")
    if args.out:
        check_writable(args.out)
    if args.read:
        printed = {tuple(path.stem.rsplit("_", 1)): path.read_text() for path in args.read}
    else:
        printed = {(spec, str(d)): profile(spec, d) for spec, d in CASES}
    found = [
        {"spec": spec, "head_size": int(d), **row}
        for (spec, d), text in printed.items()
        for row in rows(text)
    ]
    for row in found:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.out:
        lines = ",\n".join("  " + json.dumps(row) for row in found)
        where = json.dumps(args.machine or machine())
        head = f' "command": "python scripts/counters.py",\n "machine": {where},\n'
        write_text(args.out, f'{{\n{head} "rows": [\n{lines}\n ]\n}}\n')


def machine() -> str:
    """Return the GPU and the software."""
    import torch
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(exit_code("counters.py", main, {}))
