"""Run the code of another GPU on a Hopper GPU.

A GPU of compute capability 8.0, 8.6 or 8.9 multiplies with mma.sync, and Hopper GPUs have this
instruction as well. `compile_for` makes Triton generate PTX as it does for such a GPU, and assemble
that PTX for the Hopper GPU that is present. This is how the code is tested, and timed beside other
mma.sync code, without such a GPU.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from triton import knobs
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler, driver
from triton.runtime import driver as drivers

SHARED_MEMORY: Final = {80: 163, 86: 99, 89: 99}
"""KiB of shared memory that a block may use, by compute capability (CUDA C++ Programming Guide,
table "Technical Specifications per Compute Capability")."""

CODES: Final = {f"sm{capability}": capability for capability in SHARED_MEMORY}
"""What `compile_for` takes -> the compute capability."""

_HOPPER: Final = 90


def compile_for(code: str) -> None:
    """Compile all kernels of this process for another GPU, and assemble them for Hopper.

    From now on the other GPU's compute capability is Triton's target. A block has no more shared
    memory than on that GPU: a launch that needs more raises OutOfResources, as it does there. All
    else is as on the present GPU, also the memory that the blocks of one multiprocessor share.
    Kernels that are compiled for a given target, as PyTorch's compiler does, are not affected.

    Args:
        code: one of `CODES`.

    Raises:
        ValueError: if code is unknown.
        RuntimeError: if the kernels would not run so in this process; it says why.
    """
    if code not in CODES:
        raise ValueError(f"unknown code {code!r}; known are {', '.join(CODES)}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"no CUDA device; {code} code runs on a Hopper GPU")
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        if 10 * major + minor != _HOPPER:
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(
                f"{name} has compute capability {major}.{minor}; {code} code runs on a Hopper GPU"
            )
    if knobs.runtime.interpret:
        raise RuntimeError(f"TRITON_INTERPRET is set, so nothing is compiled for {code}; unset it")
    if knobs.runtime.override_arch:
        raise RuntimeError(f"TRITON_OVERRIDE_ARCH would replace {code}; unset it")
    # Triton's keys of compiled kernels contain this version, which it reads once.
    if compiler.get_ptxas_version.cache_info().currsize:
        raise RuntimeError(f"a kernel was compiled in this process before {code} was chosen")
    backend = backend_for(CODES[code])
    backends["nvidia"] = backend
    drivers.set_active(backend.driver())


def backend_for(foreign: int) -> Backend:
    """Return a backend of Triton that compiles for one of `SHARED_MEMORY`, on a Hopper GPU."""

    class Compiler(compiler.CUDABackend):
        def make_cubin(self, src: Any, metadata: Any, opt: Any, capability: int) -> bytes:
            device = _HOPPER if capability == foreign else capability
            return super().make_cubin(src, metadata, opt, device)

        def hash(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
            """Return what the keys of Triton's cache contain of the target.

            Without the addition, a kernel would have the key of one that the other GPU can run.
            """
            of_target = super().hash()
            is_foreign = self.target.arch == foreign
            return f"{of_target}-assembled for {_HOPPER}" if is_foreign else of_target

    class Driver(driver.CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.utils: Any = _Utils(self.utils, SHARED_MEMORY[foreign] * 1024)

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", foreign, 32)

    return Backend(Compiler, Driver)


class _Utils:
    """The functions of Triton's driver, with a limit in bytes to the shared memory of a block."""

    def __init__(self, utils: Any, limit: int) -> None:
        self._utils = utils
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._utils.get_device_properties(device) | {"max_shared_mem": self._limit}
