"""Finds FlashAttention-2's kernels in PyTorch's library, and reads their machine code.

Which template runs on which GPU is decided by flash_bwd_launch_template.h and
flash_fwd_launch_template.h of github.com/Dao-AILab/flash-attention, csrc/flash_attn/src: by the
shared memory of a block in the backward, by the compute capability in the forward.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

from tests.support.sass import loops


@dataclass(frozen=True)
class FlashKernel:
    name: str
    head_size: int
    tile: tuple[int, int]  #: queries, keys
    warps: int
    is_causal: bool
    registers: int
    stack: int
    loops: list[dict[str, int]]


BACKWARD = ((64, 128, 128, 8, 4, 4, 4, 0), (64, 64, 128, 8, 2, 4, 4, 1))
BACKWARD += ((128, 64, 128, 8, 2, 4, 2, 0), (128, 64, 64, 8, 4, 2, 2, 1))
"""Flash_bwd_kernel_traits: head size, queries, keys, warps, layouts of atoms, V in registers. Of
each head size the first runs where a block has 144 KB of shared memory, the second elsewhere."""

FORWARD = {
    False: ((64, 128, 128, 4), (128, 128, 64, 4), (128, 128, 32, 4)),
    True: ((64, 128, 128, 4), (128, 128, 64, 4), (128, 64, 64, 4)),
}
"""Flash_fwd_kernel_traits, by whether the mask is causal: head size, queries, keys, warps. At head
size 128, compute capabilities 8.6 and 8.9 run the last, all others the one before."""


def symbols() -> Iterator[tuple[str, tuple[int, ...], bool, re.Pattern[bytes]]]:
    """Yield kernel, traits, whether it is causal, and what its mangled name looks like.

    The kernels are those without dropout, window, ALiBi and softcap, for whole tiles.
    """
    for is_causal in (False, True):
        flags = f"Lb0ELb{int(is_causal)}ELb0ELb0ELb1ELb1ELb0E"
        for traits in BACKWARD:
            numbers = "".join(f"Li{n}E" for n in traits[:7])
            kind = f"23Flash_bwd_kernel_traitsI{numbers}Lb{traits[7]}ELb0E"
            yield _named(
                "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", traits, is_causal, kind, flags
            )
        for traits in FORWARD[is_causal]:
            numbers = "".join(f"Li{n}E" for n in traits)
            kind = f"23Flash_fwd_kernel_traitsI{numbers}Lb0ELb0E"
            yield _named("flash_fwd_kernel", traits, is_causal, kind, f"{flags}Lb0E")


def _named(
    name: str, traits: tuple[int, ...], is_causal: bool, kind: str, flags: str
) -> tuple[str, tuple[int, ...], bool, re.Pattern[bytes]]:
    mangled = (
        f"_ZN13pytorch_flash{len(name)}{name}I{kind}[^\\0]*?bfloat16_t[^\\0]*?EE{flags}EEv\\w+"
    )
    return name, traits, is_causal, re.compile(mangled.encode())


def flash_kernels(library: Path) -> Iterator[FlashKernel]:
    """Yield the kernels of `symbols`, from the library's code for sm80.

    Raises:
        ValueError: if the library lacks one.
    """
    cuobjdump = knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [cuobjdump, "-xelf", "sm_80", str(library.resolve())],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        cubins = {path: path.read_bytes() for path in sorted(Path(folder).glob("*.cubin"))}
        cubins = {path: code for path, code in cubins.items() if b"pytorch_flash" in code}
        for name, traits, is_causal, pattern in symbols():
            hits = ((path, pattern.search(code)) for path, code in cubins.items())
            path, symbol = next(((p, hit[0].decode()) for p, hit in hits if hit), (None, ""))
            if path is None:
                raise ValueError(f"{library} has no {name} with {traits} for sm80")

            def output(*options: str, path: Path = path) -> str:
                return subprocess.run(
                    [cuobjdump, *options, str(path)], check=True, capture_output=True, text=True
                ).stdout

            usage = output("--dump-resource-usage").partition(f"Function {symbol}:")[2]
            yield FlashKernel(
                name,
                traits[0],
                (traits[1], traits[2]),
                traits[3],
                is_causal,
                _number("REG", usage),
                _number("STACK", usage),
                [dict(loop.issued) for loop in loops(output("-sass", "-fun", symbol))],
            )


def _number(name: str, usage: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", usage)
    assert found is not None
    return int(found[1])
