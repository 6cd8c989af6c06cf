"""Compile the kernels as the host code launches them, for a GPU that need not exist.

`tests.support.compiler` starts this program with one of two versions of Triton, and without the
interpreter that other tests use. The program first writes a line with Triton's version. After that
it reads one request a line and writes one reply a line; all lines are JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver
from triton.runtime.errors import OutOfResources

from sagesim.problem import resolve_input16
from sagesim.spec import AttentionSpec
from sagesim_kernels.bench import foreign_target
from sagesim_kernels.dispatch import backward, forward
from sagesim_kernels.operands import LAUNCH, Extras, Gradients, KernelProblem, Packing
from tests.support.garbage import collect_garbage_rarely
from tests.support.many_steps import in_many_steps
from tests.support.sass import issued_in_loop, loops, lost_descriptors

SHARED_MEMORY = {**foreign_target.SHARED_MEMORY, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB of shared memory that a block may use, by compute capability."""

TENSOR_MEMORY = 512
"""Columns of tensor memory, on GPUs that have it."""

# Modules whose kernels multiply no matrices.
_PREPARATION = (
    "sagesim_kernels.operands.",
    "sagesim_kernels.preparation.",
)

# An instruction that multiplies matrices, with its qualifiers.
_PRODUCT = re.compile(r"^\s*(?:@!?%\w+ )?((?:wgmma\.mma|mma|wmma\.mma|tcgen05\.mma)[\w.:]*)", re.M)
# Barriers, waits for products, and arrivals at barriers in memory.
_MEETING = re.compile(
    r"\b(bar\.sync|bar\.warp\.sync|barrier\.sync|wgmma\.wait_group|mbarrier\.arrive)"
)
# Loads from shared memory, with the address; fences before accesses by TMA and wgmma; arrivals.
_SHARED = re.compile(
    r"\b(ld\.shared|st\.shared|stmatrix|bar\.sync|fence\.proxy\.async|mbarrier\.arrive|"
    r"mbarrier\.try_wait)"
    r"([\w.:]*)([^;]*)"
)
# Accesses to memory that other kernels may write, and the wait for them. Parameters and shared
# memory are others.
_GLOBAL = re.compile(
    r"^\s*(?:@!?%p\d+ )?((?:ld|st|red|atom|cp|prefetch|griddepcontrol\.wait)\b[\w.:]*)", re.M
)
# ptxas fuses a multiplication into an addition only if neither says how it is rounded.
_FUSIBLE = re.compile(r"\b(?:mul|add|sub)\.f32(?:x2)?\b")
# A conversion from or to FP8, of two numbers.
_FP8_CONVERSION = re.compile(r"\bcvt\.[\w.]*\be[45]m[23]x2[\w.]*")
# A conversion to FP8 of two numbers, and the register that gets both.
_FP8_PAIR = re.compile(r"\bcvt\.[\w.]*\be[45]m[23]x2\.f32\s+(%\w+),")
_REGISTER = re.compile(r"%[a-z]+\d+\b")
# What an instruction of PTX writes, and what it reads.
_ASSIGNMENT = re.compile(r"^\s*(?:@!?%p\d+ )?[a-z][\w.:]*\s+(%\w+|\{[^}]*\}), ([^;]*);", re.M)
# A matrix product in Triton IR, with the formats of its operands.
_DOT = re.compile(r"tt\.dot .* : tensor<[\dx]+x(\w+)> \* tensor<[\dx]+x(\w+)> -> ")


class AbsentGPU:
    """A driver for compilation alone. Its devices are compute capabilities."""

    capability = 80

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def utils(self) -> AbsentGPU:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "multiprocessor_count": 132,
            "max_shared_mem": SHARED_MEMORY[self.capability] * 1024,
        }


def check_memory(kernel: Any, capability: int) -> None:
    """Raise OutOfResources if a block needs more memory than it may use, as a launch does.

    The host then tries its next tile.
    """
    limit = SHARED_MEMORY[capability] * 1024
    if kernel.metadata.shared > limit:
        raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
    if (kernel.metadata.tmem_size or 0) > TENSOR_MEMORY:
        raise OutOfResources(kernel.metadata.tmem_size, TENSOR_MEMORY, "tensor memory")


class _Absent:
    """In place of a compiled kernel that is not looked at."""

    hash = ""
    asm: Final = {"ptx": ""}

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        return lambda *args: None


class _Launches:
    """Compiles kernels and records them instead of launching them."""

    def __init__(self) -> None:
        self.kernels: list[dict[str, Any]] = []
        self.with_preparation = True
        self.with_loops = False
        self._warmup = JITFunction.warmup
        JITFunction.warmup = lambda fn, *args, **options: self._compile(fn, *args, **options)
        CompiledKernel.__getitem__ = lambda kernel, grid: lambda *args: self._add(kernel, args)

    def _compile(self, fn: JITFunction, *args: Any, **options: Any) -> Any:
        if fn.__module__.startswith(_PREPARATION) and not self.with_preparation:
            return _Absent()
        return self._warmup(fn, *args, **options)

    def _add(self, kernel: Any, args: tuple[Any, ...]) -> None:
        check_memory(kernel, driver.active.capability)
        fn = kernel.src.fn
        named = dict(zip(fn.arg_names, args, strict=True))
        self.kernels.append(
            {
                "hash": kernel.hash,
                "name": _name(fn, named),
                "tile": _tile(named),
                "step": named["CONFIG"].queries if fn.__name__ == "ampere_backward" else None,
                "warps": kernel.metadata.num_warps,
                "stages": kernel.metadata.num_stages,
                "fp_fusion": kernel.metadata.enable_fp_fusion,
                "package": fn.__module__.rpartition(".")[0],
                **_contents(kernel, self.with_loops),
            }
        )


def _name(fn: JITFunction, args: dict[str, Any]) -> str:
    """The kernel's name, and what it computes if the kernel can compute one of two things."""
    if fn.__name__ in ("p_rows_kernel", "ampere_p_rows", "hopper_p_rows") and args["delta"] is None:
        return f"{fn.__name__}, sums"
    if fn.__name__ == "gradients_kernel":
        names = {"dq": "dq_sums", "dk": "dk", "dv": "dv"}
        return ", ".join([fn.__name__, *(n for n, arg in names.items() if args[arg] is not None)])
    return fn.__name__


def _tile(args: dict[str, Any]) -> int | None:
    """The rows that a program owns."""
    return args["sizes"].TILE.value if "sizes" in args else args.get("TILE")


def _contents(kernel: Any, with_loops: bool) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    dots = []
    for left, right in _DOT.findall(kernel.asm.get("ttir", "")):  # Gluon kernels have no ttir
        dots.append(left if left == right else f"{left} * {right}")
    return {
        "dots": dots,
        "opcodes": Counter(_PRODUCT.findall(ptx)),
        "fp8_conversions": Counter(_FP8_CONVERSION.findall(ptx)),
        "reused_conversions": _reused_conversions(ptx),
        "permutations": len(re.findall(r"\bprmt\.", ptx)),
        "fusible": len(_FUSIBLE.findall(ptx)),
        "has_fp64": ".f64" in ptx,
        "early_arrivals": _early_arrivals(ptx),
        "unfenced_loads": _unfenced_loads(ptx),
        "waits": "griddepcontrol.wait" in ptx,
        "accesses_before_wait": _accesses_before_wait(ptx),
        "narrow_stores": len(re.findall(r"\bst\.global\.[bu](?:8|16)\b", ptx)),
        "narrow_loads": len(re.findall(r"\bld\.global(?:\.L\w+)*\.[bu](?:8|16)\b", ptx)),
        "shared": kernel.metadata.shared,
        **_machine_code(kernel.asm["cubin"], ptx, with_loops),
    }


def _reused_conversions(ptx: str) -> int:
    """Count the conversions to FP8 whose register is read more than once."""
    uses = Counter(re.findall(r"%\w+", ptx))
    return sum(uses[register] > 2 for register in _FP8_PAIR.findall(ptx))


def _early_arrivals(ptx: str) -> int:
    """Count the mbarrier.arrive instructions that do not directly follow a barrier of threads.

    Only the instructions that `_MEETING` finds are considered.
    """
    events = _MEETING.findall(ptx)
    return sum(
        now == "mbarrier.arrive" and not before.startswith("bar")
        for before, now in itertools.pairwise(events)
    )


def _accesses_before_wait(ptx: str) -> list[str]:
    """Return the accesses to global memory before the wait for earlier kernels; all without one."""
    before = itertools.takewhile(lambda x: not x.startswith("griddepcontrol"), _GLOBAL.findall(ptx))
    return [x for x in before if ".param" not in x and ".shared." not in f"{x}."]


def _unfenced_loads(ptx: str) -> int:
    """Count the mbarrier.arrive instructions that follow loads from shared memory without a fence.

    Without it, TMA may overwrite what a load has not read yet. Loads in which all threads read the
    same address do not count: those of a kernel's arguments, and of the tile that a producer has
    found. Nor does the byte of each warp that says what it runs next, nor loads of 16 bytes behind
    stores and a barrier, by which threads exchange the rows of a result. Threads store these, and
    not TMA.
    """
    if "mbarrier.arrive" not in ptx:
        return 0
    of_threads = _registers_of_threads(ptx)
    count, is_loaded, is_stored, is_exchanged = 0, False, False, False
    for name, qualifiers, operands in _SHARED.findall(ptx):
        if name == "ld.shared":
            address = _REGISTER.findall(operands[operands.index("[") :])
            is_of_threads = not (of_threads.isdisjoint(address) or qualifiers.endswith(".b8"))
            is_of_result = is_exchanged and qualifiers.startswith(".v4.")
            is_loaded |= is_of_threads and not is_of_result
        elif name in ("st.shared", "stmatrix"):
            is_stored = True
        elif name == "bar.sync":
            is_exchanged |= is_stored
        elif ".expect_tx" not in qualifiers:
            is_stored = is_exchanged = False
            if name != "mbarrier.try_wait":
                count += is_loaded and name == "mbarrier.arrive"
                is_loaded = False
    return count


def _registers_of_threads(ptx: str) -> set[str]:
    """Return the registers that hold other numbers in other threads."""
    readers: dict[str, set[str]] = defaultdict(set)
    for written, read in _ASSIGNMENT.findall(ptx):
        for register in _REGISTER.findall(read) + re.findall(r"%(?:tid|laneid)", read):
            readers[register].update(_REGISTER.findall(written))
    found: set[str] = set()
    waiting = {"%tid", "%laneid"}
    while waiting:
        waiting = set().union(*(readers[x] for x in waiting)) - found
        found |= waiting
    return found


def _machine_code(cubin: bytes, ptx: str, with_loops: bool) -> dict[str, Any]:
    """Read a thread's registers and its stack, to which registers are spilled. In kernels with
    wgmma also count the waits that ptxas added, and read what `tests.support.sass` finds."""

    def output(*command: str) -> str:
        return subprocess.run(
            [*command, file.name], check=True, capture_output=True, text=True
        ).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
        # disassembling takes half a second
        is_listed = with_loops or "wgmma" in ptx
        listing = output(knobs.nvidia.nvdisasm.path, "-c") if is_listed else ""
    return {
        "registers": int(re.search(r"\bREG:(\d+)", usage)[1]),
        "stack": int(re.search(r"\bSTACK:(\d+)", usage)[1]),
        "added_waits": listing.count("WARPGROUP.DEPBAR") - ptx.count("wgmma.wait_group"),
        "lost_descriptors": lost_descriptors(listing),
        "issued_in_loop": issued_in_loop(listing),
        "loops": [loop.issued for loop in loops(listing)] if with_loops else [],
    }


def _extras(names: list[str], tokens: int) -> Extras:
    """The masks, sinks and softcap that are named."""
    every = {
        "window": (100, 20),
        "key_mask": torch.empty(1, tokens, dtype=torch.bool, device="meta"),
        "seqused_k": torch.empty(1, dtype=torch.int64, device="meta"),
        "sinks": torch.empty(2, device="meta"),
        "softcap": 20.0,
    }
    return Extras(**{name: every[name] for name in names})


def _compile(request: dict[str, Any], launches: _Launches) -> list[dict[str, Any]]:
    """Compile forward and backward of a request. Most fields are arguments of `Compiler.compile`.

    has_many_steps: whether the head size is a `ManySteps`.
    """
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
        spec=resolve_input16(AttentionSpec.parse(request["spec"]), dtype),
        scale=0.125,
        is_causal=request["is_causal"],
        lower_right=False,
        packing=Packing(cu, None, tokens, tokens),
        extras=_extras(request["extras"], tokens),
    )
    launches.kernels = []
    launches.with_preparation = request["preparation"]
    launches.with_loops = request["loops"]
    before = dict(LAUNCH)
    LAUNCH.update(request["launch"])
    try:
        grads = Gradients(*map(torch.empty_like, (q, k, v)))
        with in_many_steps(request["has_many_steps"]):
            result = forward(problem, o)
            backward(problem, do, None, o, result, grads)
    finally:
        LAUNCH.clear()
        LAUNCH.update(before)
    return launches.kernels


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of the compiler out of the replies
    collect_garbage_rarely()
    driver.set_active(AbsentGPU())
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
