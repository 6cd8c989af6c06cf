"""Table 1 of the paper through the kernels, beside the emulator's figures on the same inputs.

    python benchmarks/kernel_accuracy.py --out docs/data/table1_kernels.json

Needs a GPU. Inputs are those of `sagesim.experiments.gaussian`, rounded to the inputs' dtype first;
errors are relative L2 against float64 on the rounded inputs, over all draws together.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from torch import Tensor

import sagesim
import sagesim_kernels
from sagesim.experiments.gaussian import COLUMNS, PAPER_TABLE_1, Setting

LABELS = ("sagebwd", "factored", "factored_pv16")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(sigma: float, label: str, dtype: torch.dtype, setting: Setting) -> dict[str, object]:
    """Errors of kernels and emulator, and the distance between them, of each tensor of Table 1."""
    spec = sagesim.AttentionSpec.parse(label)
    draws = [setting.inputs(sigma, draw) for draw in range(setting.draws)]
    q, k, v, do = (torch.stack([d[i] for d in draws]).cuda().to(dtype) for i in range(4))
    found = sagesim_kernels.trace(q, k, v, do, spec=spec, is_causal=setting.is_causal)
    emulated = sagesim.trace(q, k, v, do, spec=spec, is_causal=setting.is_causal)
    exact = sagesim.exact(q, k, v, do, is_causal=setting.is_causal)
    row: dict[str, object] = {"label": label, "dtype": str(dtype).removeprefix("torch.")}
    row["sigma"] = sigma
    for name in COLUMNS:
        kernel, emulator, true = (getattr(t, name) for t in (found, emulated, exact))
        row[name] = {
            "kernels": distance(kernel, true),
            "emulator": distance(emulator, true),
            "between": distance(kernel, emulator),
        }
    return row


def distance(a: Tensor, reference: Tensor) -> float:
    """|a - reference| / |reference|, in float64."""
    a, reference = a.double(), reference.double()
    return float((a - reference).norm() / reference.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    setting = Setting()
    rows = [
        measure(sigma, label, dtype, setting)
        for dtype in DTYPES.values()
        for label in LABELS
        for sigma in PAPER_TABLE_1
    ]
    head = {
        "command": "python benchmarks/kernel_accuracy.py --out docs/data/table1_kernels.json",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, sagebwd {sagesim.__version__}",
        "setting": asdict(setting),
    }
    args.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    for row in rows:
        cells = "  ".join(f"{n} {row[n]['kernels']:.4f} {row[n]['emulator']:.4f}" for n in COLUMNS)
        print(row["label"], row["dtype"], row["sigma"], cells)


if __name__ == "__main__":
    main()
