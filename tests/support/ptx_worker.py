"""Run the forward and backward kernels for mma.sync on the CPU; see `ptx`.

`PtxRunner` starts this program, because the interpreter that other tests use excludes compiling. It
reads one request a line and writes one reply a line; all lines are JSON. A request names files:
one with the arguments of a call, and one for its results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagesim.spec import AttentionSpec
from tests.support.compiler import OLDEST, ROOT
from tests.support.ptx import WARP, Program, Range
from tests.support.shared_races import Race


class KernelRun(NamedTuple):
    """What the kernels computed."""

    o: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_sinks: Tensor | None
    kernels: list[str]  #: for mma.sync that ran
    config: dict[str, int]  #: of the backward: fields of `Config`
    races: list[str]  #: without each barrier of the backward in turn; "" if none was found


class PtxRunner:
    """A process that runs kernels. folder: for its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (OLDEST, ROOT)))
        environment["TRITON_CACHE_DIR"] = str(folder / "triton")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.ptx_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        tensors: dict[str, Tensor],
        spec: AttentionSpec,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        lower_right: bool = False,
        window: tuple[int, int] = (-1, -1),
        capability: int = 80,
        removes_barriers: bool = False,
    ) -> KernelRun:
        """Run a forward and its backward.

        tensors: q, k, v and do, [batch, heads, tokens, channels], and any of the tensors of
            `Extras`.
        lower_right: how the causal mask is aligned.
        capability: compute capability of the GPU for which the kernels are compiled, of those in
            `compile_worker.SHARED_MEMORY`. Tiles depend on its shared memory.
        removes_barriers: run the backward also without each of its barriers. This spoils dq.
        """
        files = {name: str(self._folder / f"{name}.pt") for name in ("arguments", "results")}
        torch.save(tensors, files["arguments"])
        request = {
            **files,
            "spec": spec.label(),
            "scale": tensors["q"].shape[3] ** -0.5 if scale is None else scale,
            "is_causal": is_causal,
            "lower_right": lower_right,
            "window": window,
            "capability": capability,
            "removes_barriers": removes_barriers,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process ended without a reply; its stderr says why")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return KernelRun(**torch.load(files["results"]), **reply)

    def close(self) -> None:
        self._process.communicate()


class _Launches:
    """Replaces `JITFunction.run`: compiles kernels, and runs their PTX."""

    def __init__(self) -> None:
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime import JITFunction

        CUDABackend.make_cubin = lambda *_: b""  # the PTX is what runs
        self.kernels: list[str] = []
        self.config: dict[str, int] = {}
        self.races: list[str] = []
        self.removes_barriers = False
        self._compile = JITFunction.run
        self._programs: dict[str, Program] = {}
        JITFunction.run = lambda fn, *args, **options: self._launch(fn, *args, **options)

    def _launch(self, fn: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        from triton.runtime import driver
        from triton.runtime.errors import OutOfResources

        from tests.support.compile_worker import SHARED_MEMORY

        kernel = self._compile(fn, *args, grid=grid, warmup=True, **options)
        if warmup:
            return kernel
        limit = SHARED_MEMORY[driver.active.capability] * 1024
        if kernel.metadata.shared > limit:
            raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
        if kernel.hash not in self._programs:
            self._programs[kernel.hash] = Program(kernel.asm["ptx"])
        arguments: list[int | float] = []
        memory: list[Range] = []
        for name, value in zip(fn.arg_names, args, strict=True):
            _flatten(kernel.src.signature[name], value, arguments, memory)
        threads = WARP * kernel.metadata.num_warps
        program = self._programs[kernel.hash]
        program.run(arguments, grid[0], threads, memory)
        if fn.__module__.startswith("sagesim_kernels.ampere"):
            self.kernels.append(fn.__name__)
        if fn.__name__ == "ampere_backward":
            self.config = args[fn.arg_names.index("CONFIG")]._asdict()
            for barrier in program.barriers if self.removes_barriers else ():
                self.races.append("")
                try:
                    program.without(barrier).run(arguments, grid[0], threads, memory)
                except Race as race:
                    self.races[-1] = str(race)
        return kernel


def _flatten(kind: Any, value: Any, arguments: list[int | float], memory: list[Range]) -> None:
    """Append what a launch passes for a parameter. kind: its type, or those of a tuple's fields."""
    if isinstance(kind, tuple | list):
        for each, field in zip(kind, value, strict=True):
            _flatten(each, field, arguments, memory)
    elif kind.startswith("*"):
        storage = value.untyped_storage()
        memory.append(Range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        arguments.append(value.data_ptr())
    elif kind.startswith("fp"):
        arguments.append(float(value))
    elif kind != "constexpr":
        arguments.append(int(value))


def _run(request: dict[str, Any]) -> dict[str, Tensor]:
    from sagesim.problem import resolve_input16
    from sagesim.spec import Delta
    from sagesim_kernels.dispatch import backward, forward
    from sagesim_kernels.operands import Extras, Gradients, KernelProblem, natural_lse

    tensors = torch.load(request["arguments"])
    q, k, v, do = (tensors.pop(name) for name in ("q", "k", "v", "do"))
    problem = KernelProblem.of(
        q,
        k,
        v,
        spec=resolve_input16(AttentionSpec.parse(request["spec"]), q.dtype),
        scale=request["scale"],
        is_causal=request["is_causal"],
        lower_right=request["lower_right"],
        extras=Extras(window=tuple(request["window"]), **tensors),
    )
    o = torch.empty_like(do)
    result = forward(problem, o)
    grads = Gradients(*map(torch.empty_like, (q, k, v)))
    is_from_o = problem.spec.delta is Delta.FROM_O
    d_sinks, delta = backward(problem, do, None, o if is_from_o else None, result, grads)
    lse = natural_lse(problem, result)
    return {"o": o, "lse": lse, "delta": delta, "d_sinks": d_sinks, **grads._asdict()}


def main() -> None:
    from triton.runtime import driver

    from tests.support.compile_worker import AbsentGPU

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of the compiler out of the replies
    driver.set_active(AbsentGPU())
    launches = _Launches()
    for line in sys.stdin:
        request = json.loads(line)
        launches.kernels, launches.races = [], []
        launches.removes_barriers = request["removes_barriers"]
        driver.active.capability = request["capability"]
        try:
            torch.save(_run(request), request["results"])
            fields = ("kernels", "config", "races")
            reply = {name: getattr(launches, name) for name in fields}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
