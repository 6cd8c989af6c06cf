"""Count the instructions that a warp issues in one step of each kernel's loop, on Hopper.

    python scripts/instructions.py [--out FILE.json]

Compiles as `make test` does, for sm90 by the oldest Triton, and reads the machine code. It needs no
GPU and times nothing. See `tests.support.sass.issued_in_loop`. Specs with Hopper's own kernels are
left out: the warps of these kernels run different loops.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from tests.support.compiler import OLDEST, Compiler, Kernel  # noqa: E402

SPECS = ("factored_qk", "factored_pv16", "factored", "sagebwd")
HEAD_SIZES = (64, 128)
BLOCK = 64
"""Queries or keys of a step of the loop, in every preset."""


def row(spec: str, head_size: int, kernel: Kernel) -> dict[str, object]:
    """The counts of one kernel. per_64x64: instructions for 64 x 64 elements of the map."""
    assert kernel.tile is not None
    issued = sum(kernel.issued_in_loop.values())
    tiles = kernel.tile * BLOCK / 64**2
    return {
        "spec": spec,
        "head_size": head_size,
        "kernel": kernel.name,
        "tile": f"{kernel.tile}x{BLOCK}",
        "warps": kernel.warps,
        "registers": kernel.registers,
        "stack": kernel.stack,
        "instructions": issued,
        "per_64x64": round(issued * kernel.warps / 4 / tiles),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out:
        check_writable(args.out)
    with tempfile.TemporaryDirectory() as cache:
        compiler = Compiler(Path(cache), OLDEST)
        rows = [
            row(spec, head_size, kernel)
            for spec in SPECS
            for head_size in HEAD_SIZES
            for kernel in compiler.compile(spec, 90, head_size=head_size)
            if kernel.dots
        ]
        compiler.close()
    for r in rows:
        print("  ".join(f"{key} {value}" for key, value in r.items()))
    if args.out:
        record = {
            "command": "python scripts/instructions.py --out docs/data/instructions.json",
            "machine": f"compiled for sm90 by Triton {compiler.version}, causal, bfloat16",
            "rows": rows,
        }
        write_text(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code("instructions.py", main, {}))
