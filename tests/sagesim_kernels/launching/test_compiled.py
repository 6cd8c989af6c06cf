"""A kernel that Triton 3.6 compiles wrongly does not run."""

from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from sagesim_kernels.launching import CompilerFault, check_compiled
from sagesim_kernels.portable.tiles import Tile, try_tiles

# tid & 3 is shifted by 4 in the upper half; tid is shifted by 28 in the lower half, and spills.
FAULTY = """
    and.b32 	%r9, %r5, 3;
    mul.wide.u32 	%rd197, %r5, 268435456;
    cvt.u64.u32 	%rd198, %r9;
    shl.b64 	%rd199, %rd198, 36;
    or.b64 	%rd200, %rd197, %rd199;
    shr.u64 	%rd4, %rd200, 32;
"""
TILES = (Tile(64, 4, 2), Tile(64, 4, 1))


def compiled(ptx: str) -> Any:
    return SimpleNamespace(hash=ptx, name="gradients_kernel", asm={"ptx": ptx})


@pytest.mark.parametrize("ptx", [FAULTY, FAULTY.replace("%rd197, %rd199", "%rd199, %rd197")])
def test_a_number_that_spills_into_another_is_found(ptx: str) -> None:
    for _ in range(2):
        with pytest.raises(CompilerFault, match=r"compiled gradients_kernel wrongly .*268435456"):
            check_compiled(compiled(ptx))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("268435456", "4194304"),  # tid is below 1024, so that this product has 32 bits
        ("or.b64 	%rd200, %rd197, %rd199", "or.b64 	%rd200, %rd1970, %rd199"),
    ],
)
def test_other_products_pass(old: str, new: str) -> None:
    ptx = FAULTY.replace(old, new)
    assert ptx != FAULTY
    check_compiled(compiled(ptx))


def test_another_tile_is_tried() -> None:
    tried: list[Tile] = []

    def run(tile: Tile) -> None:
        tried.append(tile)
        if tile.num_stages == 2:
            check_compiled(compiled(FAULTY))

    try_tiles(TILES, run, "the backward")
    assert tried == [*TILES]


def test_the_fault_is_named_if_no_tile_is_left() -> None:
    def run(tile: Tile) -> None:
        if tile.num_stages == 2:
            raise OutOfResources(2, 1, "shared memory")
        check_compiled(compiled(FAULTY))

    with pytest.raises(CompilerFault, match="compiled gradients_kernel wrongly"):
        try_tiles(TILES, run, "the backward")
