"""The model against examples computed by hand."""

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from sagesim.spec import PRESETS
from sagesim_kernels.cards import (
    CARDS,
    FLASH,
    Fit,
    Measured,
    Shape,
    blocks,
    clocks,
    fits_without_each,
    fitted,
    flash_tile,
    loop_clocks,
    loops_ms,
    loops_of,
    measurements,
    missed_share,
    other_bytes,
    predict,
    programs_of,
    rms,
    tile_clocks,
)

FIT = Fit(power=1, stall=0.5, spilled=0)
A100 = replace(CARDS["A100"], l2_bytes=32)
SUM = 220 + 35 + 50 + 40 + 0.5 * 100
"""Clocks of a tile with COUNTS and MOVED on this A100: with the power 1 all parts are added."""

COUNTS = {"HMMA.16816": 100, "IMMA.16832": 10, "fp32": 80, "imad": 8, "alu": 60, "xu": 14}
COUNTS |= {"f2i": 6, "shuffle": 4, "local": 8, "other": 110}
MOVED = {"shared": 2560, "copy": 1280, "local": 128, "atomic": 320}


def row(**fields: Any) -> dict[str, Any]:
    return {
        "spec": "sagebwd",
        "capability": 80,
        "head_size": 64,
        "is_causal": False,
        "kernel": "ampere_forward",
        "loop": "only",
        "tile": "64x64",
        "warps": 4,
        "registers": 255,
        "shared": 40 * 1024 - 1024,
        "stack": 0,
        "counts": COUNTS,
        "bytes": MOVED,
    } | fields


def test_clocks_of_each_unit_on_an_a100():
    # An HMMA.16816 has 4096 operations and an IMMA.16832 has 8192: 2 clocks each.
    assert clocks(A100, COUNTS, MOVED) == {
        "tensor": 100 * 2 + 10 * 2,
        "shared": (2560 + 1280 + 128) / 128 + 4,
        "l2": (1280 + 320) / 32,
        "special": 20 * 2,
        "issue": 400 / 4,
        "fp32": 80 / 2 + 8 / 2,
        "integer": 60 / 2,
    }


def test_clocks_on_an_rtx_4090():
    found = clocks(CARDS["RTX 4090"], COUNTS, MOVED)
    assert found["tensor"] == 100 * 8 + 10 * 4
    assert found["fp32"] == 80 / 4 + 8 / 2


def test_an_rtx_5090_converts_slowly():
    found = clocks(CARDS["RTX 5090"], COUNTS, MOVED)
    assert found["special"] == 14 * 2 + 6 * 16


@pytest.mark.parametrize("product", ["DMMA.884", "HMMA.848", "HGMMA.64x64x16"])
def test_an_unknown_product_is_an_error(product: str):
    with pytest.raises(ValueError, match=rf"the rate of {product} on A100"):
        clocks(A100, {product: 1}, {})


def test_the_power_decides_how_units_overlap():
    by_unit = loop_clocks(A100, row())
    assert tile_clocks(by_unit, FIT) == pytest.approx(SUM)
    two = math.sqrt(220**2 + 35**2 + 50**2 + 40**2 + 50**2)
    assert tile_clocks(by_unit, replace(FIT, power=2)) == pytest.approx(two)
    assert tile_clocks(by_unit, replace(FIT, power=50)) == pytest.approx(220)


def test_spilled_registers_take_time():
    by_unit = clocks(A100, COUNTS, MOVED) | {"spilled": 2}
    assert tile_clocks(by_unit, replace(FIT, spilled=10)) == pytest.approx(SUM + 10 * 2)


@pytest.mark.parametrize(
    ("registers", "shared", "programs"), [(255, 40, 2), (255, 140, 1), (168, 40, 3), (128, 49, 3)]
)
def test_a_wait_for_a_spilled_register_is_shared_by_the_programs(
    registers: int, shared: int, programs: int
):
    one = row(registers=registers, shared=shared * 1024)
    assert programs_of(A100, one) == programs
    assert loop_clocks(A100, one)["spilled"] == pytest.approx(8 / 4 / programs)


def test_the_slowest_of_issue_and_arithmetic_counts():
    by_unit = loop_clocks(A100, row())
    slow = by_unit | {"integer": 120}
    assert tile_clocks(slow, FIT) == pytest.approx(SUM + 0.5 * (120 - 100))


@pytest.mark.parametrize("tokens", [256, 1024])
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 128), (128, 128), (128, 32)])
def test_blocks_under_a_causal_mask_are_those_with_an_attended_element(
    tokens: int, tile: tuple[int, int]
):
    m, n = tile
    whole = masked = 0
    for first in range(0, tokens, m):
        for key in range(0, tokens, n):
            whole += key + n - 1 <= first
            masked += key + n - 1 > first and key <= first + m - 1
    assert blocks(tokens, m, n, True) == (whole, masked)
    assert blocks(tokens, m, n, False) == (tokens // m * (tokens // n), 0)


def test_time_of_a_loop():
    # 16 tiles a head, 54 heads on 108 multiprocessors at 1.41 GHz
    shape = Shape(54, 256, 64, False)
    expected = 54 * 16 * SUM / (108 * 1.41e9) * 1e3
    assert loops_ms(A100, [row()], shape, FIT) == pytest.approx(expected)


def test_masked_tiles_run_the_masked_loop():
    slow = COUNTS | {"other": 110 + 80}  # 20 clocks more to issue
    rows = [row(loop="unmasked"), row(loop="masked", counts=slow)]
    found = loops_ms(A100, rows, Shape(1, 256, 64, True), FIT)
    assert found == pytest.approx((6 * SUM + 4 * (SUM + 10)) / (108 * 1.41e9) * 1e3)


def test_kernels_of_a_pass_are_summed():
    rows = [row(kernel="p_rows_kernel"), row(kernel="gradients_kernel, dq, dk, dv")]
    shape = Shape(1, 256, 64, False)
    assert loops_ms(A100, rows, shape, FIT) == 2 * loops_ms(A100, rows[:1], shape, FIT)


@pytest.mark.parametrize(
    ("card", "fields", "expected"),
    [
        ("A100", {"stack": 0}, 0),
        # Two programs: 2 x 40 KiB of 192 are shared. 2 x 128 threads need 112 KiB at 448 bytes.
        ("A100", {"stack": 448}, 0),
        ("A100", {"stack": 896}, 0.5),
        ("RTX 4090", {"stack": 448}, 1 - 48 / 112),
        # The shared memory suffices for one program.
        ("RTX 4090", {"stack": 448, "shared": 68 * 1024 - 1024}, 0),
        ("RTX 4090", {"stack": 960, "shared": 68 * 1024 - 1024}, 0.5),
        # The registers suffice for one program.
        ("A100", {"stack": 448, "warps": 8}, 0),
        ("A100", {"stack": 1216, "warps": 8}, 0.5),
        ("A100", {"stack": 4000, "shared": None}, 0),
    ],
)
def test_spilled_registers_that_the_l1_cache_does_not_hold(
    card: str, fields: dict[str, Any], expected: float
):
    assert missed_share(CARDS[card], row(**fields)) == pytest.approx(expected)


def test_missed_registers_pass_through_the_l2_cache():
    shape = Shape(1, 256, 64, False)
    some, half = (
        loops_ms(A100, [row(bytes={"local": 32 * 1000}, stack=stack)], shape, FIT)
        for stack in (448, 896)
    )
    rest = SUM - 35 - 50 + 4  # without the bytes of MOVED; shuffles stay
    assert half / some == pytest.approx((rest + 250 + 500) / (rest + 250))


def test_the_loops_of_a_pass_are_those_of_the_cards_code():
    rows = [row(), row(capability=89), row(kernel="gradients_kernel, dq, dk, dv")]
    shape = Shape(1, 256, 64, False)
    assert loops_of(CARDS["H100"], rows, "sagebwd", shape, forward=True) == rows[:1]
    assert loops_of(CARDS["L40S"], rows, "sagebwd", shape, forward=True) == rows[1:2]
    assert loops_of(A100, rows, "sagebwd", shape, forward=False) == rows[2:]
    with pytest.raises(ValueError, match="no loops of factored for A100"):
        loops_of(A100, rows, "factored", shape, forward=True)


@pytest.mark.parametrize(
    ("card", "forward", "head_size", "is_causal", "tile"),
    [
        ("A100", False, 64, False, "128x128"),
        ("RTX 4090", False, 64, False, "64x128"),
        ("H200", False, 128, True, "64x128"),
        ("RTX 5090", False, 128, True, "64x64"),
        ("RTX 3090", True, 128, False, "128x32"),
        ("L40S", True, 128, True, "64x64"),
        ("RTX 5090", True, 128, True, "128x64"),
        ("A100", True, 64, True, "128x128"),
    ],
)
def test_flash_attention_runs_the_template_of_its_launcher(
    card: str, forward: bool, head_size: int, is_causal: bool, tile: str
):
    assert flash_tile(CARDS[card], forward, head_size, is_causal) == tile
    rows = [row(spec=FLASH, kernel=k, tile=t, head_size=head_size, is_causal=is_causal)
            for k in ("flash_fwd_kernel", "flash_bwd") for t in (tile, "32x32")]  # fmt: skip
    shape = Shape(1, 256, head_size, is_causal)
    (found,) = loops_of(CARDS[card], rows, FLASH, shape, forward=forward)
    assert found["tile"] == tile


@pytest.mark.parametrize(
    ("spec", "forward", "expected"),
    [
        ("fpa_bf16", True, 8),
        ("factored_qk", True, 8 + 2 + 2 * 3),  # the mean of K; Q and K
        ("sagebwd", True, 8 + 2 + 3 * 3),
        ("fpa_bf16", False, 12 + 10 + 8 + 4),
        ("factored_qk", False, 12 + 10 + 2 * 3 + 2 + 4),  # Q and K; v; o and dO
        ("sagebwd", False, 12 + 10 + 3 * 3 + 8 + 4),  # Q, K and dO, each in one way
        ("factored", False, 12 + 10 + 5 * 3 + 8),  # Q and K in two ways each, dO
    ],
)
def test_bytes_beside_the_loops(spec: str, forward: bool, expected: int):
    assert other_bytes(PRESETS[spec], forward=forward) == expected


def test_bytes_beside_the_loops_of_flash_attention():
    assert other_bytes(None, forward=True) == 8
    assert other_bytes(None, forward=False) == 12 + 10 + 4 + 20


def test_a_prediction_adds_the_bytes():
    shape = Shape(2, 256, 64, False)
    found = predict(A100, [row()], "sagebwd", shape, FIT, forward=True)
    assert found.other == pytest.approx(2 * 256 * 64 * 19 / 2039e9 * 1e3)
    assert found.total == found.loops + found.other


RECORD = {
    "machine": {"gpu": "NVIDIA H100 80GB HBM3"},
    "settings": {"code": "sm86"},
    "cases": {
        "speed": {
            "part": "speed",
            "batch": 4,
            "heads": 16,
            "tokens": 4096,
            "head_dim": 128,
            "is_causal": True,
            "runs": {
                "sagebwd": {"forward": {"ms": 1.0}, "backward": {"ms": 3.0}},
                "sdpa flash": {"forward": {"ms": 2.0}, "backward": {"ms": 5.0}},
            },
        },
        "accuracy": {"part": "accuracy"},
    },
}


def test_measured_passes_are_read():
    shape = Shape(64, 4096, 128, True)
    h100 = CARDS["H100"]
    assert list(measurements(RECORD, ["sagebwd", "factored", FLASH])) == [
        Measured(h100, 86, "sagebwd", shape, True, 1.0),
        Measured(h100, 86, "sagebwd", shape, False, 3.0),
        Measured(h100, 86, FLASH, shape, True, 2.0),
        Measured(h100, 86, FLASH, shape, False, 5.0),
    ]


def test_an_unknown_gpu_is_an_error():
    with pytest.raises(ValueError, match="NVIDIA B200 is none of A100"):
        list(measurements(RECORD | {"machine": {"gpu": "NVIDIA B200"}}, [FLASH]))


H100 = CARDS["H100"]
SHAPE = Shape(32, 1024, 64, False)
TIMED = {
    "sagebwd": (COUNTS | {"other": 500, "local": 400}, MOVED),
    "factored": (COUNTS, {"atomic": 16000}),
    "factored_qk": (COUNTS | {"other": 2000}, {"atomic": 8000}),
    "factored_pv16": (COUNTS | {"HMMA.16816": 400}, {"shared": 90000}),
    "fpa_bf16": ({"HMMA.16816": 400}, {"atomic": 16000}),
}
ROWS = [row(spec=spec, counts=counts, bytes=moved) for spec, (counts, moved) in TIMED.items()]
TRUE = Fit(power=2.5, stall=1.7, spilled=12)


def timed(spec: str, fit: Fit) -> Measured:
    times = predict(H100, ROWS, spec, SHAPE, fit, forward=True)
    return Measured(H100, 80, spec, SHAPE, True, times.total)


def test_the_error_is_of_the_whole_pass():
    measured = replace(timed("sagebwd", TRUE), ms=2 * timed("sagebwd", TRUE).ms)
    assert measured.error(ROWS, TRUE) == pytest.approx(-math.log(2))


def test_the_fit_finds_the_numbers_that_made_the_times():
    measured = [timed(spec, TRUE) for spec in TIMED]
    found = fitted(measured, ROWS)
    assert rms(each.error(ROWS, found) for each in measured) < 0.01
    for name, true in asdict(TRUE).items():
        assert getattr(found, name) == pytest.approx(true, rel=0.05)


def test_a_fit_without_a_spec_does_not_see_its_times():
    measured = [timed(spec, TRUE) for spec in TIMED]
    wrong = [replace(each, ms=each.ms * (3 if each.spec == "sagebwd" else 1)) for each in measured]
    found, unspoiled = fits_without_each(wrong, ROWS), fits_without_each(measured, ROWS)
    assert found["sagebwd"] == unspoiled["sagebwd"]
    assert found["factored"] != unspoiled["factored"]
