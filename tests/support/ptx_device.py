"""Run the kernels of this process on the CPU, from the PTX that they have on a GPU: see `ptx`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tests.support.compile_worker import AbsentGPU, check_memory
from tests.support.ptx import WARP, Program, Range
from tests.support.ptx_hopper import HopperBlocks, Maps, TensorMap

CODES: Final = {f"sm{capability}": capability for capability in (80, 86, 89, 90)}
"""What `--code` takes without a GPU -> compute capability."""

_HOPPER: Final = 90


class _SmallGPU(AbsentGPU):
    """So few multiprocessors that a program computes several tiles in calls of a test, too."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return super().get_device_properties(device) | {"multiprocessor_count": 3}


class PtxLaunches:
    """Replaces launches of compiled kernels: runs their PTX."""

    def __init__(self, capability: int = 80) -> None:
        """capability: compute capability of the GPU for which kernels are compiled at first."""
        CUDABackend.make_cubin = lambda *_: b""  # the PTX is what runs
        self._gpu = _SmallGPU()
        self.compile_for(capability)
        driver.set_active(self._gpu)
        self.kernels: list[str] = []  #: of the packages for some GPUs, that ran
        self.config: dict[str, int] = {}  #: of the kernels that have one
        self.races: list[str] = []  #: without each of that backward's barriers
        self.removes_barriers = False
        self._programs: dict[str, Program] = {}
        CompiledKernel.__getitem__ = lambda kernel, grid: partial(self._launch, kernel, grid)

    def compile_for(self, capability: int) -> None:
        """Choose another GPU."""
        self._gpu.capability = capability

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
        fn = kernel.src.fn
        check_memory(kernel, self._gpu.capability)
        if kernel.hash not in self._programs:
            self._programs[kernel.hash] = Program(kernel.asm["ptx"])
        passed = _Passed(kernel.metadata.tensordesc_meta)
        for name, value in zip(fn.arg_names, args, strict=True):
            passed.add(kernel.src.signature[name], value)
        program, arguments, memory = self._programs[kernel.hash], passed.arguments, passed.memory
        threads = WARP * kernel.metadata.num_warps
        is_hopper = self._gpu.capability == _HOPPER
        make_blocks = partial(HopperBlocks, maps=passed.maps) if is_hopper else None
        program.run(arguments, math.prod(grid), threads, memory, make_blocks)
        if fn.__module__.startswith(("sagesim_kernels.ampere", "sagesim_kernels.hopper")):
            self.kernels.append(fn.__name__)
        if fn.__name__ in ("ampere_backward", "hopper_backward", "hopper_forward"):
            self.config |= args[fn.arg_names.index("CONFIG")]._asdict()
        if fn.__name__ == "ampere_backward" and self.removes_barriers:
            launch = arguments, math.prod(grid), threads, memory
            self.races += program.races_without_barriers(*launch)


class _Passed:
    """What a launch passes to a kernel. descriptions: of its tensor descriptors, in order."""

    def __init__(self, descriptions: list[dict[str, Any]] | None) -> None:
        self.arguments: list[int | float] = []
        self.memory: list[Range] = []
        self.maps = Maps()
        self._descriptions = iter(descriptions or ())

    def add(self, kind: Any, value: Any) -> None:
        """Append the numbers of a parameter. kind: its type, or those of a tuple's fields."""
        if isinstance(kind, tuple | list):
            for each, field in zip(kind, value, strict=True):
                self.add(each, field)
        elif kind.startswith("*"):
            self.arguments.append(self._address(value))
        elif kind.startswith("tensordesc"):
            self._address(value.base)
            tensor_map = TensorMap.of(value, next(self._descriptions))
            self.arguments += [self.maps.add(tensor_map), *value.shape, *value.strides]
        elif kind.startswith("fp"):
            self.arguments.append(float(value))
        elif kind != "constexpr":
            self.arguments.append(int(value))

    def _address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.memory.append(Range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return tensor.data_ptr()


def run_on_cpu(code: str) -> None:
    """Run all kernels of this process on the CPU, from the PTX of a GPU.

    The public functions take tensors of the CPU from now on. Launches are not recorded.

    Args:
        code: one of `CODES`.

    Raises:
        ValueError: if code is unknown.
    """
    from sagesim_kernels import api
    from sagesim_kernels.launching import plans
    from tests.support.kernels import UNPLANNED

    if code not in CODES:
        raise ValueError(f"unknown code {code!r}; without a GPU, {', '.join(CODES)} are known")
    PtxLaunches(CODES[code])
    api.IS_INTERPRETED = True
    vars(plans).update(UNPLANNED)
