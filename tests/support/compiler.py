"""Compile kernels with the oldest or newest Triton, for GPUs that need not be present."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.many_steps import ManySteps

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("compile_worker.py")
OLDEST = ROOT / ".venv" / ".triton-oldest"
"""The folder where `make test` installs the oldest Triton that pyproject.toml allows."""

TOKENS = 256
"""More than the largest tile."""

LATE_WAITS = {
    "prepare_queries_kernel": ("ld.global",),  # Q, O, dO and lengths
    "hopper_backward": ("ld.global",),  # lengths
    "hopper_forward": (),
    "hopper_forward_codes": (),
}
"""Kernels that do not wait for earlier ones first -> their accesses to global memory before that.
They read what the kernel before them does not write."""

_SHAPE = re.compile(r"\.m(\d+)n(\d+)k(\d+)\.")
_FORMATS = {
    ".s8.s8": "i8",
    ".e4m3.e4m3": "f8E4M3FN",
    ".e5m2.e5m2": "f8E5M2",
    "kind::f8f6f4": "8 bit",
    ".f16.f16": "f16",
    ".bf16.bf16": "bf16",
    "kind::i8": "i8",
    "kind::f16": "16 bit",  # a descriptor in a register holds the format
}


@dataclass(frozen=True)
class Kernel:
    """One compiled launch."""

    hash: str  #: launches with the same one run the same code
    name: str  #: the kernel's name, and what it computes if it can compute one of two things
    tile: int | None  #: rows that a program owns
    step: int | None  #: queries of a step of its loops; None: a block of the spec
    warps: int
    stages: int
    fp_fusion: bool  #: whether ptxas may fuse multiplications into additions
    dots: list[str]  #: operand format of each matrix product, in order; empty for Gluon kernels
    opcodes: dict[str, int]  #: counts of the instructions that multiply matrices
    fp8_conversions: dict[str, int]  #: counts of the instructions that convert from or to FP8
    reused_conversions: int  #: conversions to FP8 whose result is read more than once
    permutations: int  #: instructions that rearrange the bytes of registers
    fusible: int  #: multiplications and additions that ptxas may fuse
    has_fp64: bool
    early_arrivals: int  #: arrivals at barriers in memory before all threads are done
    unfenced_loads: int  #: arrivals after loads that TMA may overwrite before they read
    waits: bool  #: whether it waits for earlier kernels, see `sagesim_kernels.launching.dependent`
    accesses_before_wait: list[str]  #: to global memory; all if it does not wait
    narrow_stores: int  #: stores of less than 32 bits to global memory
    narrow_loads: int  #: loads of less than 32 bits from global memory
    shared: int  #: bytes
    registers: int  #: of each thread
    stack: int  #: bytes of each thread; 0 if no register is spilled
    added_waits: int  #: waits for wgmma that ptxas added
    lost_descriptors: list[str]  #: see `tests.support.sass`
    issued_in_loop: dict[str, int]  #: see `tests.support.sass`
    package: str  #: the package that the kernel is written in
    loops: list[dict[str, int]]  #: what a warp issues in a step of each loop, if asked for

    @cached_property
    def formats(self) -> set[str]:
        """Operand formats of the instructions."""
        return {_format(opcode) for opcode in self.opcodes}

    @property
    def reads_too_early(self) -> bool:
        """Whether it waits for earlier kernels after accesses that `LATE_WAITS` does not allow."""
        allowed = LATE_WAITS.get(self.name, ())
        return self.waits and not all(x.startswith(allowed) for x in self.accesses_before_wait)

    @property
    def spilling(self) -> float:
        """The share of the loop's instructions that load or store spilled registers."""
        issued = self.issued_in_loop
        spilled = sum(n for opcode, n in issued.items() if opcode.startswith(("LDL", "STL")))
        return spilled / max(sum(issued.values()), 1)

    @cached_property
    def unsized(self) -> set[str]:
        """The formats of instructions that do not state their shape."""
        return {_format(opcode) for opcode in self.opcodes if not _SHAPE.search(opcode)}

    @cached_property
    def multiply_adds(self) -> dict[str, int]:
        """Multiply-adds by operand format; without tcgen05, which does not state its shape."""
        result: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            if shape := _SHAPE.search(opcode):
                m, n, k = map(int, shape.groups())
                groups = self.warps // 4 if opcode.startswith("wgmma") else self.warps
                result[_format(opcode)] += m * n * k * count * groups
        return dict(result)


def _format(opcode: str) -> str:
    return next((name for part, name in _FORMATS.items() if part in opcode), opcode)


class Compiler:
    """A process that compiles kernels; it caches results.

    packages: the folder of its Triton; the installed one by default.
    """

    def __init__(self, cache: Path, packages: Path | None = None) -> None:
        if packages is not None and not packages.is_dir():
            raise FileNotFoundError(
                f"{packages} has no Triton; `make {packages.relative_to(ROOT)}`"
            )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        path = [ROOT] if packages is None else [packages, ROOT]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": str(cache)},
        )
        self._kept: dict[str, list[Kernel]] = {}
        try:
            self.version: str = self._reply()["triton"]
        except RuntimeError:
            self.close()
            raise

    def compile(
        self,
        spec: str,
        capability: int,
        *,
        head_size: int = 64,
        value_head_size: int | None = None,
        dtype: str = "bfloat16",
        is_causal: bool = True,
        tokens: int = TOKENS,
        packed: bool = False,
        extras: Sequence[str] = (),
        preparation: bool = True,
        loops: bool = False,
        **launch: Any,
    ) -> list[Kernel]:
        """Compile the kernels of a forward and its backward, in the order of launches.

        packed: compile for packed sequences, as in a varlen call.
        extras: names of fields of `sagesim_kernels.operands.Extras` to set.
        preparation: whether to compile the kernels that prepare operands and multiply no matrices.
            Without them the result may still contain them.
        loops: whether to fill `Kernel.loops`, which takes half a second a kernel.
        launch: options that replace those of `sagesim_kernels.operands.rounding.LAUNCH`.
        """
        request = {
            "spec": spec,
            "capability": capability,
            "head_size": head_size,
            "has_many_steps": isinstance(head_size, ManySteps),
            "value_head_size": value_head_size or head_size,
            "dtype": dtype,
            "is_causal": is_causal,
            "tokens": tokens,
            "packed": packed,
            "extras": list(extras),
            "preparation": True,
            "loops": loops,
            "launch": launch,
        }
        if not preparation and json.dumps(request) not in self._kept:
            request["preparation"] = False
        return self._compile(json.dumps(request))

    def _compile(self, request: str) -> list[Kernel]:
        if request not in self._kept:
            assert self._process.stdin is not None
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            reply = self._reply()
            if "error" in reply:
                raise RuntimeError(f"Triton {self.version}, {request}:\n{reply['error']}")
            self._kept[request] = [Kernel(**kernel) for kernel in reply["kernels"]]
        return self._kept[request]

    def close(self) -> None:
        self._process.communicate()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the compiler ended with status {self._process.wait()}")
        return json.loads(line)
