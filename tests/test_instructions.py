"""How `scripts/instructions.py` turns loops into rows, and finds FlashAttention-2's kernels."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import flash_library  # noqa: E402
import instructions  # noqa: E402

from sagesim import PRESETS  # noqa: E402
from sagesim_kernels.cards import CARDS, FLASH, Shape, loops_of  # noqa: E402

COMMON = {"kernel": "forward_kernel", "head_size": 64, "warps": 4, "tile": 64}
STEP = {"HMMA.16816.F32.BF16": 64, "MUFU.EX2": 32, "FADD": 100, "LDS.64": 10, "BRA": 2}
"""Of four warps: 4 x 64 x 2048 multiply-adds, two products of 64 x 64 x 64."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward_kernel", 2),
        ("p_rows_kernel", 2),
        ("p_rows_kernel, sums", 1),
        ("ampere_forward", 2),
        ("ampere_p_rows", 2),
        ("ampere_p_rows, sums", 1),
        ("ampere_backward", 5),
        ("gradients_kernel, dq, dk, dv", 5),
        ("gradients_kernel, dq, dk", 4),
        ("gradients_kernel, dk", 3),
        ("gradients_kernel, dv", 2),
        ("gradients_kernel, dq_sums", 3),
    ],
)
def test_products_of_kernels(name: str, expected: int):
    assert instructions.products(name) == expected


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(ValueError, match="matrix products of new_kernel"):
        instructions.products("new_kernel")


def test_a_row_counts_one_tile_of_all_warps():
    (row,) = instructions.loop_rows(COMMON, [STEP], 2)
    assert (row["loop"], row["tile"], row["instructions"]) == ("only", "64x64", 208)
    assert row["per_64x64"] == 208  # four warps on four schedulers
    assert row["counts"] == {"fp32": 400, "HMMA.16816": 256, "xu": 128, "shared": 40, "other": 8}
    assert row["bytes"] == {"shared": 4 * 10 * 256}


def test_a_step_of_several_tiles_is_divided():
    (row,) = instructions.loop_rows(COMMON | {"warps": 8}, [STEP], 2)
    assert (row["tile"], row["tiles"], row["per_64x64"]) == ("64x128", 2, 208)


def test_the_longer_loop_applies_the_mask_and_others_are_left_out():
    longer = STEP | {"FSEL": 64}
    other = {"HMMA.16816.F32.BF16": 32, "FADD": 9}  # computes no exponentials
    first, second = instructions.loop_rows(COMMON, [longer, other, STEP], 2)
    assert (first["loop"], first["instructions"]) == ("unmasked", 208)
    assert (second["loop"], second["instructions"]) == ("masked", 272)


def test_mangled_names_are_found():
    name = "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"
    cutlass = "N7cutlass10bfloat16_t"
    symbol = (
        f"_ZN13pytorch_flash44{name}I23Flash_bwd_kernel_traitsILi64ELi64ELi128ELi8ELi2ELi4ELi4ELb1"
        f"ELb0E{cutlass}E19Flash_kernel_traitsILi64ELi64ELi128ELi8ES3_EELb0ELb1ELb0ELb0ELb1ELb1ELb0"
        "EEEvNS_16Flash_bwd_paramsE"
    )
    names = b"other\0" + symbol.encode() + b"\0other"
    hits = [(entry, entry[3].search(names)) for entry in flash_library.symbols()]
    ((entry, hit),) = [(entry, hit) for entry, hit in hits if hit]
    assert entry[:3] == (name, (64, 64, 128, 8, 2, 4, 4, 1), True)
    assert hit[0].decode() == symbol


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_size", [64, 128])
def test_every_card_has_the_counts_of_what_runs_on_it(card, head_size: int, is_causal: bool):
    shape = Shape(1, 4096, head_size, is_causal)
    data = ROOT / "docs" / "data"
    ours = json.loads((data / "instructions.json").read_text())["rows"]
    flash = json.loads((data / "instructions_flash.json").read_text())["rows"]
    for forward in (False, True):
        assert loops_of(card, flash, FLASH, shape, forward=forward)
        for spec in instructions.SPECS:
            loops = loops_of(card, ours, spec, shape, forward=forward)
            # Every preset has blocks of 64 tokens. A loop goes through halves of them only if P and
            # dS are in 16 bit, so that no scale is that of a block of them.
            products = [PRESETS[spec].site(site) for site in ("dv", "dq", "dk")]
            step = 64 if forward or any(x.precision.is_scaled for x in products) else 32
            for row in loops:
                m, n = map(int, row["tile"].split("x"))
                assert m % 64 == n % step == 0
