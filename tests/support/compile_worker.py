"""Compiles the kernels just as the host code launches them, for a GPU that need not be there.

A program of its own, started by `tests.support.compiler`: with a Triton of its choice, and without
the interpreter that other tests run kernels under. It first writes a line with Triton's version;
then each line of its input is a request and gets a line in reply, all of them JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.errors import OutOfResources

from sagesim.spec import AttentionSpec
from sagesim_kernels.dispatch import backward, forward
from sagesim_kernels.operands import LAUNCH, Gradients, KernelProblem, Packing
from tests.support.sass import issued_in_loop, lost_descriptors

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB that a block may have, by compute capability (CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability")."""

TENSOR_MEMORY = 512
"""Columns, where there is tensor memory."""

# An instruction that multiplies matrices, with all that qualifies it.
_PRODUCT = re.compile(r"^\s*(?:@!?%\w+ )?((?:wgmma\.mma|mma|wmma\.mma|tcgen05\.mma)[\w.:]*)", re.M)
# Where threads meet, wait for products, and tell others that they are done.
_MEETING = re.compile(
    r"\b(bar\.sync|bar\.warp\.sync|barrier\.sync|wgmma\.wait_group|mbarrier\.arrive)"
)
# Those with .ftz are of libdevice's log2, which is written with them.
_FUSED = re.compile(r"\bfma\.rn\.f32(x2)?\b")
_FMA = re.compile(r" math\.fma .* : tensor<([\dx]+)xf32>")
# The same before it is lowered, with the formats of its operands.
_DOT = re.compile(r"tt\.dot .* : tensor<[\dx]+x(\w+)> \* tensor<[\dx]+x(\w+)> -> ")


class _AbsentGPU:
    """What Triton asks of a driver before it compiles. A device is its compute capability."""

    capability = 80

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def utils(self) -> _AbsentGPU:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": 132}


class _Launches:
    """In place of `JITFunction.run`: compiles, and keeps what would have been launched."""

    def __init__(self) -> None:
        self.kernels: list[dict[str, Any]] = []
        self._compile = JITFunction.run
        JITFunction.run = lambda fn, *args, **options: self._launch(fn, *args, **options)

    def _launch(self, fn: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = self._compile(fn, *args, grid=grid, warmup=True, **options)
        # As at a launch, so that the host goes on to its next tile.
        limit = SHARED_MEMORY[driver.active.capability] * 1024
        if kernel.metadata.shared > limit:
            raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
        if (kernel.metadata.tmem_size or 0) > TENSOR_MEMORY:
            raise OutOfResources(kernel.metadata.tmem_size, TENSOR_MEMORY, "tensor memory")
        named = dict(zip(fn.arg_names, args, strict=False))
        self.kernels.append(
            {
                "name": _name(fn, named),
                "tile": _tile(named),
                "warps": kernel.metadata.num_warps,
                "stages": kernel.metadata.num_stages,
                "fp_fusion": kernel.metadata.enable_fp_fusion,
                **_contents(kernel),
            }
        )


def _name(fn: JITFunction, args: dict[str, Any]) -> str:
    """The kernel's name, and what it computes if the kernel can compute one of two things."""
    if fn.__name__ == "dq_kernel":
        return "dq_kernel, delta" if args["dq"] is None else "dq_kernel, dq"
    if fn.__name__ == "dkdv_kernel" and None in (args["dk"], args["dv"]):
        return "dkdv_kernel, dv" if args["dk"] is None else "dkdv_kernel, dk"
    return fn.__name__


def _tile(args: dict[str, Any]) -> int | None:
    """The rows that a program owns."""
    return args["sizes"].TILE.value if "sizes" in args else args.get("TILE")


def _contents(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    dots = []
    for left, right in _DOT.findall(kernel.asm.get("ttir", "")):  # there is none of Gluon
        dots.append(left if left == right else f"{left} * {right}")
    return {
        "dots": dots,
        "opcodes": Counter(_PRODUCT.findall(ptx)),
        "permutations": len(re.findall(r"\bprmt\.", ptx)),
        "fused": _fused(kernel),
        "has_fp64": ".f64" in ptx,
        "early_arrivals": _early_arrivals(ptx),
        "narrow_stores": len(re.findall(r"\bst\.global\.[bu](?:8|16)\b", ptx)),
        "shared": kernel.metadata.shared,
        **_machine_code(kernel.asm["cubin"], ptx),
    }


def _early_arrivals(ptx: str) -> int:
    """Arrivals at a barrier in memory, by one thread, before which not all have met."""
    events = _MEETING.findall(ptx)
    return sum(
        now == "mbarrier.arrive" and not before.startswith("bar")
        for before, now in itertools.pairwise(events)
    )


def _fused(kernel: Any) -> int:
    """Multiplications of a thread that are added at once, but for those of the program itself, of
    which there may be a copy: of a loop's first step."""
    fused = sum(2 if pair else 1 for pair in _FUSED.findall(kernel.asm["ptx"]))
    shapes = _FMA.findall(kernel.asm.get("ttir", ""))
    elements = sum(math.prod(map(int, shape.split("x"))) for shape in shapes)
    written = elements // (32 * kernel.metadata.num_warps)
    return fused - written * (2 if fused >= 2 * written else 1)


def _machine_code(cubin: bytes, ptx: str) -> dict[str, Any]:
    """Registers, and bytes of stack, of a thread: registers are spilled to its stack; and where
    warpgroups multiply, the waits that are not in the ptx, and what `tests.support.sass` reads."""

    def output(*command: str) -> str:
        return subprocess.run(
            [*command, file.name], check=True, capture_output=True, text=True
        ).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
        # half a second, so not of kernels of which nothing would be read
        listing = output(knobs.nvidia.nvdisasm.path, "-c") if "wgmma" in ptx else ""
    return {
        "registers": int(re.search(r"\bREG:(\d+)", usage)[1]),
        "stack": int(re.search(r"\bSTACK:(\d+)", usage)[1]),
        "added_waits": listing.count("WARPGROUP.DEPBAR") - ptx.count("wgmma.wait_group"),
        "lost_descriptors": lost_descriptors(listing),
        "issued_in_loop": issued_in_loop(listing),
    }


def _compile(request: dict[str, Any], launches: _Launches) -> list[dict[str, Any]]:
    """Forward and backward of a request, whose fields are `Compiler.compile`'s arguments."""
    driver.active.capability = request["capability"]
    dtype = getattr(torch, request["dtype"])
    tokens = request["tokens"]
    sizes = [request["head_size"]] * 2 + [request["value_head_size"]] * 3
    q, k, v, do, o = (torch.empty(1, 2, tokens, d, dtype=dtype, device="meta") for d in sizes)
    cu = torch.empty(3, dtype=torch.int32, device="meta") if request["packed"] else None
    problem = KernelProblem.of(
        q,
        k,
        v,
        spec=AttentionSpec.parse(request["spec"]),
        scale=0.125,
        is_causal=request["is_causal"],
        lower_right=False,
        packing=Packing(cu, cu, tokens, tokens),
    )
    launches.kernels = []
    before = dict(LAUNCH)
    LAUNCH.update(request["launch"])
    try:
        result = forward(problem, o)
        backward(problem, do, None, o, result, Gradients(*map(torch.empty_like, (q, k, v))))
    finally:
        LAUNCH.clear()
        LAUNCH.update(before)
    return launches.kernels


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no reply
    driver.set_active(_AbsentGPU())
    launches = _Launches()
    print(json.dumps({"triton": triton.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = {"kernels": _compile(json.loads(line), launches)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
