"""Compile a kernel for a foreign target, without a GPU. Prints one line of JSON.

Run as a program, because the backend of Triton is a setting of the process.
"""

import json
import subprocess
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as cuda
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from sagesim_kernels.bench.foreign_target import SHARED_MEMORY, backend_for
from sagesim_kernels.target import compute_capability


@triton.jit
def product_kernel(a, b, c, count, SIZE: tl.constexpr):
    """Multiply [SIZE, count SIZE] by [count SIZE, SIZE], in INT8."""
    at = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.int32)
    for i in range(count):
        x = tl.load(a + i * SIZE * SIZE + at[:, None] * SIZE + at[None, :])
        y = tl.load(b + i * SIZE * SIZE + at[None, :] * SIZE + at[:, None])
        total = tl.dot(x, y, total, out_dtype=tl.int32)
    tl.store(c + at[:, None] * SIZE + at[None, :], total)


def compiled(capability: int, size: int = 64, stages: int = 2) -> Any:
    signature = {"a": "*i8", "b": "*i8", "c": "*i32", "count": "i32", "SIZE": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(product_kernel, signature, {"SIZE": size}, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_stages": stages})


def contents(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--list-elf", file.name]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ptx = kernel.asm["ptx"]
    return {
        "ptx": next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target")),
        "mma.sync": "mma.sync" in ptx and "wgmma" not in ptx,
        "assembled": listed.split(".")[-2],
        "key": kernel.hash,
    }


class _AbsentUtils:
    """The functions of the driver of an H200 that is not there."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}

    def load_binary(self, *arguments: Any) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024


def loaded(foreign: int, stages: int) -> dict[str, Any]:
    """Load a kernel on the absent GPU: the bytes that it needs, and the limit if that is less."""
    kernel = compiled(foreign, size=128, stages=stages)
    try:
        kernel._init_handles()
    except OutOfResources as error:
        assert error.required == kernel.metadata.shared
        return {"needs": error.required, "limit": error.limit}
    return {"needs": kernel.metadata.shared, "limit": None}


def on_an_absent_gpu(foreign: int) -> dict[str, Any]:
    cuda.CudaUtils = _AbsentUtils
    cuda.CudaLauncher = lambda source, metadata: None
    active: Any = backend_for(foreign).driver()
    active.get_current_device = lambda: 0
    driver.set_active(active)
    return {
        "capability": compute_capability(),
        "multiprocessors": active.utils.get_device_properties(0)["multiprocessor_count"],
        "loaded": [loaded(foreign, stages) for stages in (2, 5)],
    }


def main() -> None:
    native = {c: contents(compiled(c)) for c in (80, 90)}
    found: dict[str, Any] = {"triton": triton.__version__, "native": native, "foreign": {}}
    for foreign in SHARED_MEMORY:
        backends["nvidia"] = backend_for(foreign)
        found["foreign"][foreign] = contents(compiled(foreign))
    found["hopper"] = contents(compiled(90))
    found["absent"] = on_an_absent_gpu(89)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
