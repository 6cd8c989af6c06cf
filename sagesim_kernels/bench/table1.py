"""Errors of the kernels on the inputs of the paper's Table 1, beside the emulator's errors.

Needs a GPU. The inputs are those of `sagesim.analysis.Setting`, rounded to the inputs' dtype first.
Errors are relative L2 against float64 on the rounded inputs, over all draws together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor

import sagesim
import sagesim_kernels
from sagesim.analysis import COLUMNS, PAPER_TABLE_1, Setting
from sagesim.command import exit_code
from sagesim.files import check_writable, write_text
from sagesim_kernels.bench.machine import sources_hash

_PROGRAM: Final = "python -m sagesim_kernels.bench.table1"
LABELS: Final = ("sagebwd", "factored", "factored_pv16")
DTYPES: Final = (torch.float32, torch.bfloat16)


def measure(
    sigma: float, label: str, dtype: torch.dtype, setting: Setting, device: str = "cuda"
) -> dict[str, Any]:
    """Errors at one sigma under one spec, by tensor of Table 1.

    Returns:
        label, dtype, sigma, and for each of `COLUMNS` the errors "kernels" and "emulator", and
        "between", the distance of the kernels' result from the emulator's.
    """
    spec = sagesim.AttentionSpec.parse(label)
    draws = [setting.problem(sigma, draw).qkvdo for draw in range(setting.draws)]
    q, k, v, do = (torch.stack(x).to(device, dtype) for x in zip(*draws, strict=True))
    by_kernels = sagesim_kernels.trace(q, k, v, do, spec=spec, is_causal=setting.is_causal)
    by_emulator = sagesim.trace(q, k, v, do, spec=spec, is_causal=setting.is_causal)
    exact = sagesim.exact(q, k, v, do, is_causal=setting.is_causal)
    row: dict[str, Any] = {
        "label": label,
        "dtype": str(dtype).removeprefix("torch."),
        "sigma": sigma,
    }
    for name in COLUMNS:
        kernels, emulator, true = (getattr(t, name) for t in (by_kernels, by_emulator, exact))
        row[name] = {
            "kernels": relative_l2(kernels, true),
            "emulator": relative_l2(emulator, true),
            "between": relative_l2(kernels, emulator),
        }
    return row


def relative_l2(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference|, in float64."""
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: write the record, and print a line for each row.

    Raises:
        WriteError: if the record cannot be written. An unusable path raises before the first row.
    """
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.json", help="the record to write"
    )
    args = parser.parse_args(argv)
    check_writable(args.out)
    setting = Setting()
    rows = [
        measure(sigma, label, dtype, setting)
        for dtype in DTYPES
        for label in LABELS
        for sigma in PAPER_TABLE_1
    ]
    record = {
        "command": f"{_PROGRAM} --out docs/data/table1_kernels.json",
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, sagebwd {sagesim.__version__}, kernels {sources_hash()}",
        "setting": asdict(setting),
        "rows": rows,
    }
    write_text(args.out, json.dumps(record, indent=1) + "\n")
    for row in rows:
        cells = "  ".join(f"{n} {row[n]['kernels']:.4f} {row[n]['emulator']:.4f}" for n in COLUMNS)
        print(row["label"], row["dtype"], row["sigma"], cells)


if __name__ == "__main__":
    sys.exit(exit_code("sagesim_kernels.bench.table1", main, {}))
