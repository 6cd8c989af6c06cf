"""Count the instructions that a warp issues in one step of each kernel's loop, without a GPU.

    python scripts/instructions.py [--capability 80 ...] [--out FILE.json]
    python scripts/instructions.py --library libtorch_cuda.so [--out FILE.json]

The first form compiles our kernels as `make test` does, by the oldest Triton, and reads the machine
code. Kernels that are written for Hopper are left out: their warps run different loops. The kernel
of failed rows is left out, too. The second form reads FlashAttention-2's machine code for sm80 from
PyTorch's library (of the wheel for CUDA).

A row is one loop; see `tests.support.sass.loops`. `tiles` are the tiles of 64 x 64 elements of the
map that a step computes, from the multiply-adds of its matrix products. `counts` (instructions of
all warps, by class) and `bytes` are for one such tile; see `tests.support.opcodes`. `per_64x64` is
what each of four schedulers issues for one. `loop` is "masked" for the longer of two loops of a
kernel, which applies the mask, "unmasked" for the other, and "only" if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from flash_library import flash_kernels  # noqa: E402

from sagesim.command import exit_code  # noqa: E402
from sagesim.files import check_writable, write_text  # noqa: E402
from sagesim.terminal import Failure  # noqa: E402
from tests.support.compiler import OLDEST, Compiler, Kernel  # noqa: E402
from tests.support.opcodes import by_unit, bytes_by_unit, multiply_adds  # noqa: E402

SPECS = ("fpa_bf16", "factored_qk", "sagebwd", "factored_pv16", "factored")
HEAD_SIZES = (64, 128)
CAPABILITIES = (80, 86, 89, 90, 120)
TOKENS = 4096
HOPPER = "sagesim_kernels.hopper"
FAILED_ROWS = "failed_rows_kernel"
"""It has no step unless rows fail; see `sagesim_kernels.operands.fixed_reference`."""


def products(name: str) -> int:
    """The matrix products of a kernel, by the name that `tests.support.compile_worker` gives it.

    Raises:
        ValueError: if the kernel is not known.
    """
    kernel, *results = name.split(", ")
    if kernel in ("p_rows_kernel", "ampere_p_rows"):
        return 1 if results else 2
    if kernel in ("forward_kernel", "ampere_forward"):
        return 2
    if kernel not in ("gradients_kernel", "ampere_backward"):
        raise ValueError(f"add the matrix products of {kernel} to {__file__}")
    if not results:
        return 5
    return 1 + ("dk" in results or "dq_sums" in results or "dq" in results) + len(results)


def loop_rows(
    common: dict[str, Any], loops: list[dict[str, int]], matrix_products: int
) -> list[dict[str, Any]]:
    """The rows of a kernel's loops that compute exponentials; the shorter of two is unmasked.

    common: fields of all rows. Its "tile" are the queries or keys that a program owns. Those that a
        step goes through follow from the multiply-adds.
    """
    attention = [loop for loop in loops if any(x.startswith("MUFU.EX2") for x in loop)]
    names = ("only",) if len(attention) == 1 else ("unmasked", "masked")
    if len(attention) > 2:
        raise ValueError(f"{common['kernel']} has {len(attention)} loops: {common}")
    result = []
    for name, loop in zip(names, sorted(attention, key=lambda x: sum(x.values())), strict=False):
        issued, warps = sum(loop.values()), common["warps"]
        multiplied = sum(multiply_adds(opcode) * count for opcode, count in loop.items()) * warps
        tiles = multiplied / (64 * 64 * common["head_size"] * matrix_products)
        each = warps / tiles
        result.append(
            {
                **common,
                "tile": f"{common['tile']}x{round(tiles * 64 * 64 / common['tile'])}",
                "loop": name,
                "tiles": tiles,
                "instructions": issued,
                "per_64x64": round(issued * each / 4),
                "counts": {unit: round(n * each, 2) for unit, n in by_unit(loop).items()},
                "bytes": {unit: round(n * each) for unit, n in bytes_by_unit(loop).items()},
            }
        )
    return result


def our_rows(compiler: Compiler, capabilities: list[int]) -> Iterator[dict[str, Any]]:
    for capability in capabilities:
        for spec in SPECS:
            for head_size in HEAD_SIZES:
                for is_causal in (False, True):
                    for kernel in compiler.compile(
                        spec,
                        capability,
                        head_size=head_size,
                        is_causal=is_causal,
                        tokens=TOKENS,
                        preparation=False,
                        loops=True,
                    ):
                        is_left_out = kernel.package == HOPPER or kernel.name == FAILED_ROWS
                        if kernel.loops and not is_left_out:
                            yield from kernel_rows(spec, capability, head_size, is_causal, kernel)


def kernel_rows(
    spec: str, capability: int, head_size: int, is_causal: bool, kernel: Kernel
) -> list[dict[str, Any]]:
    common = {
        "capability": capability,
        "spec": spec,
        "head_size": head_size,
        "is_causal": is_causal,
        "kernel": kernel.name,
        "tile": kernel.tile or 64,
        "warps": kernel.warps,
        "registers": kernel.registers,
        "stack": kernel.stack,
        "shared": kernel.shared,
    }
    return loop_rows(common, kernel.loops, products(kernel.name))


def library_rows(library: Path) -> Iterator[dict[str, Any]]:
    for kernel in flash_kernels(library):
        common = {
            "capability": 80,
            "spec": "flash",
            "head_size": kernel.head_size,
            "is_causal": kernel.is_causal,
            "kernel": kernel.name,
            "tile": kernel.tile[0],
            "warps": kernel.warps,
            "registers": kernel.registers,
            "stack": kernel.stack,
            "shared": None,
        }
        yield from loop_rows(common, kernel.loops, 2 if kernel.name == "flash_fwd_kernel" else 5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--capability", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--library", type=Path, help="count FlashAttention-2 in this library")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out:
        check_writable(args.out)
    if args.library:
        if not args.library.is_file():
            raise Failure(f"--library {args.library}: no such file")
        rows = list(library_rows(args.library))
        command = "--library libtorch_cuda.so"
        machine = "FlashAttention-2 in PyTorch's library, sm80, bfloat16"
    else:
        with tempfile.TemporaryDirectory() as cache:
            compiler = Compiler(Path(cache), OLDEST)
            rows = list(our_rows(compiler, args.capability))
            compiler.close()
        chosen = (
            "" if args.capability == list(CAPABILITIES) else " ".join(map(str, args.capability))
        )
        command = f"--capability {chosen}" if chosen else ""
        machine = f"compiled by Triton {compiler.version}, bfloat16, {TOKENS} tokens"
    for r in rows:
        print("  ".join(f"{key} {value}" for key, value in r.items()))
    if args.out:
        words = ["python scripts/instructions.py", command, f"--out docs/data/{args.out.name}"]
        record = {"command": " ".join(filter(None, words)), "machine": machine, "rows": rows}
        write_text(args.out, compact(record))


def compact(record: dict[str, Any]) -> str:
    """JSON with one line for each row."""
    head = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=1)
    rows = ",\n".join("  " + json.dumps(row) for row in record["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(exit_code("instructions.py", main, {}))
