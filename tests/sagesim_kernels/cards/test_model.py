"""The model against examples computed by hand."""

import math
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
    fitted,
    flash_tile,
    loops_ms,
    loops_of,
    measurements,
    other_bytes,
    predict,
    rms,
    tile_clocks,
)

FIT = Fit(power=1, stall=0.5, l2_bytes=32)
SUM = 220 + 35 + 50 + 40 + 0.5 * 100
"""Clocks of a tile with COUNTS and MOVED on an A100: with the power 1 all parts are added."""

COUNTS = {"HMMA.16816": 100, "IMMA.16832": 10, "fp32": 80, "imad": 8, "alu": 60, "xu": 20}
COUNTS |= {"shuffle": 4, "other": 118}
MOVED = {"shared": 2560, "copy": 1280, "local": 128, "atomic": 320}


def row(**fields: Any) -> dict[str, Any]:
    return {
        "spec": "sagebwd",
        "capability": 80,
        "head_size": 64,
        "is_causal": False,
        "kernel": "forward_kernel",
        "loop": "only",
        "tile": "64x64",
        "stack": 0,
        "counts": COUNTS,
        "bytes": MOVED,
    } | fields


def test_clocks_of_each_unit_on_an_a100():
    # An HMMA.16816 has 4096 operations and an IMMA.16832 has 8192: 2 clocks each.
    assert clocks(CARDS["A100"], COUNTS, MOVED, FIT) == {
        "tensor": 100 * 2 + 10 * 2,
        "shared": (2560 + 1280 + 128) / 128 + 4,
        "l2": (1280 + 320) / 32,
        "special": 20 * 2,
        "issue": 400 / 4,
        "fp32": 80 / 2 + 8 / 2,
        "integer": 60 / 2,
    }


def test_clocks_on_an_rtx_4090():
    found = clocks(CARDS["RTX 4090"], COUNTS, MOVED, FIT)
    assert found["tensor"] == 100 * 8 + 10 * 4
    assert found["fp32"] == 80 / 4 + 8 / 2


def test_products_of_a_warpgroup_have_their_own_rate():
    # Four warps count one instruction each: 2 * 64 * 64 * 16 operations at 4096 a clock.
    counts = {"HGMMA.64x64x16": 4}
    assert clocks(CARDS["H100"], counts, {}, FIT)["tensor"] == 32
    with pytest.raises(ValueError, match=r"HGMMA.64x64x16 on A100"):
        clocks(CARDS["A100"], counts, {}, FIT)


def test_an_unknown_product_is_an_error():
    with pytest.raises(ValueError, match=r"DMMA.884"):
        clocks(CARDS["A100"], {"DMMA.884": 1}, {}, FIT)


def test_the_power_decides_how_units_overlap():
    by_unit = clocks(CARDS["A100"], COUNTS, MOVED, FIT)
    assert tile_clocks(by_unit, FIT) == SUM
    two = math.sqrt(220**2 + 35**2 + 50**2 + 40**2 + 50**2)
    assert tile_clocks(by_unit, Fit(2, 0.5, 32)) == pytest.approx(two)
    assert tile_clocks(by_unit, Fit(50, 0.5, 32)) == pytest.approx(220)


def test_the_slowest_of_issue_and_arithmetic_counts():
    by_unit = clocks(CARDS["A100"], COUNTS, MOVED, FIT)
    slow = by_unit | {"integer": 120}
    assert tile_clocks(slow, FIT) == SUM + 0.5 * (120 - 100)


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
    assert loops_ms(CARDS["A100"], [row()], shape, FIT) == pytest.approx(expected)


def test_masked_tiles_run_the_masked_loop():
    slow = COUNTS | {"other": 118 + 80}  # 20 clocks more to issue
    rows = [row(loop="unmasked"), row(loop="masked", counts=slow)]
    found = loops_ms(CARDS["A100"], rows, Shape(1, 256, 64, True), FIT)
    assert found == pytest.approx((6 * SUM + 4 * (SUM + 10)) / (108 * 1.41e9) * 1e3)


def test_kernels_of_a_pass_are_summed():
    rows = [row(kernel="p_rows_kernel"), row(kernel="gradients_kernel, dq, dk, dv")]
    shape = Shape(1, 256, 64, False)
    assert loops_ms(CARDS["A100"], rows, shape, FIT) == 2 * loops_ms(
        CARDS["A100"], rows[:1], shape, FIT
    )


def test_many_spilled_registers_pass_through_the_l2_cache():
    shape = Shape(1, 256, 64, False)
    bytes_ = {"local": 32 * 1000}
    few, many = (
        loops_ms(CARDS["A100"], [row(bytes=bytes_, stack=stack)], shape, FIT)
        for stack in (100, 2000)
    )
    rest = SUM - 35 - 50 + 4  # without the bytes of MOVED; shuffles stay
    assert many / few == pytest.approx((rest + 250 + 1000) / (rest + 250))


def test_the_loops_of_a_pass_are_those_of_the_cards_code():
    rows = [row(), row(capability=89), row(kernel="gradients_kernel, dq, dk, dv")]
    shape = Shape(1, 256, 64, False)
    assert loops_of(CARDS["H100"], rows, "sagebwd", shape, forward=True) == rows[:1]
    assert loops_of(CARDS["L40S"], rows, "sagebwd", shape, forward=True) == rows[1:2]
    assert loops_of(CARDS["A100"], rows, "sagebwd", shape, forward=False) == rows[2:]
    with pytest.raises(ValueError, match="no loops of factored for A100"):
        loops_of(CARDS["A100"], rows, "factored", shape, forward=True)


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
        ("fpa_bf16", True, 0),
        ("factored_qk", True, 2 + 2 * 3),  # the mean of K; Q and K
        ("sagebwd", True, 2 + 3 * 3),
        ("fpa_bf16", False, 4 + 18),
        ("sagebwd", False, 3 * 3 + 4 + 18),  # Q, K and dO, each in one way
        ("factored", False, 5 * 3 + 18),  # Q and K in two ways each, dO
    ],
)
def test_bytes_beside_the_loops(spec: str, forward: bool, expected: int):
    assert other_bytes(PRESETS[spec], forward=forward) == expected


def test_a_prediction_adds_the_bytes():
    shape = Shape(2, 256, 64, False)
    found = predict(CARDS["A100"], [row()], "sagebwd", shape, FIT, forward=True)
    assert found.other == pytest.approx(2 * 256 * 64 * 11 / 2039e9 * 1e3)
    assert found.total == found.loops + found.other


def test_measured_passes_are_read():
    document = {
        "runs": [
            {
                "card": "H100",
                "code": 80,
                "sequences": 2,
                "channels": 2048,
                "tokens": 4096,
                "rows": [
                    {
                        "spec": "sagebwd",
                        "head_size": 128,
                        "is_causal": True,
                        "forward_ms": 1.0,
                        "backward_ms": 3.0,
                        "backward_loops_ms": 2.5,
                    }
                ],
            }
        ]
    }
    first, second = measurements(document)
    shape = Shape(32, 4096, 128, True)
    assert first == Measured("H100", 80, "sagebwd", shape, True, 1.0, None)
    assert second == Measured("H100", 80, "sagebwd", shape, False, 3.0, 2.5)


def test_the_fit_finds_the_numbers_that_made_the_times():
    shape = Shape(32, 1024, 64, False)
    counts = {
        "sagebwd": (COUNTS | {"other": 500}, MOVED),
        "factored": (COUNTS, {"atomic": 16000}),
        "factored_qk": (COUNTS | {"other": 2000}, {"atomic": 8000}),
        "factored_pv16": (COUNTS | {"HMMA.16816": 400}, {"shared": 90000}),
        "fpa_bf16": ({"HMMA.16816": 400}, {"atomic": 16000}),
    }
    rows = [row(spec=spec, counts=c, bytes=moved) for spec, (c, moved) in counts.items()]
    true = Fit(power=2.5, stall=1.7, l2_bytes=20)
    measured = []
    for spec in counts:
        times = predict(CARDS["A100"], rows, spec, shape, true, forward=True)
        measured.append(Measured("A100", 80, spec, shape, True, 0.0, times.loops))
    found = fitted(measured, rows)
    assert rms(each.error(rows, found) for each in measured) < 0.01
    for name in ("power", "stall", "l2_bytes"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.05)


def test_a_measured_pass_without_a_profile_includes_the_other_work():
    shape = Shape(32, 1024, 64, False)
    times = predict(CARDS["A100"], [row()], "sagebwd", shape, FIT, forward=True)
    measured = Measured("A100", 80, "sagebwd", shape, True, times.total, None)
    assert measured.error([row()], FIT) == pytest.approx(0)
