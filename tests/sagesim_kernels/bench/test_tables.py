"""Tables of a record with known numbers."""

import pytest

from sagesim_kernels.bench.cases import PASSES, PAYOFF_SITES, PEERS, SPECS
from sagesim_kernels.bench.every_table import every_table
from sagesim_kernels.bench.tables import (
    Panel,
    accuracy,
    memory,
    not_run,
    panels,
    payoff,
    preparation,
    ranges,
    ratios,
    sigmas,
    speed,
    times,
    waits,
)
from tests.sagesim_kernels.bench.documents import document, of_other_code, without

FULL, CAUSAL = Panel(64, False), Panel(64, True)
LENGTHS = ["512", "1024", "2048", "4096", "8192", "16384", "32768"]


def column(table, name):
    return [row[list(table.head).index(name)] for row in table.rows]


def row(table, name):
    (found,) = (cells for first, *cells in table.rows if first == name)
    return found


def test_panels():
    assert panels(document(), "speed") == [Panel(d, c) for d in (64, 128) for c in (False, True)]
    assert str(CAUSAL) == "head size 64, causal mask"


def test_speed():
    """One millisecond for 10^12 operations is 1000 TFLOP/s."""
    for which in PASSES:
        table = speed(document(), CAUSAL, which)
        assert table.head == ["tokens", *LENGTHS] and column(table, "tokens") == [*SPECS, *PEERS]
        assert set(row(table, "factored")) == {"1000"}
        assert set(row(table, "sdpa cudnn")) == {"800"}


def test_a_contender_that_did_not_run_has_a_row_without_numbers():
    for make in (speed, times, memory):
        assert set(row(make(document(), FULL), "flash-attn-4")) == {"-"}
        assert set(row(make(document(), FULL), "FlexAttention")) == {"-"}
        assert "-" not in row(make(document(), CAUSAL), "FlexAttention")


def test_every_title_names_the_code_if_it_is_not_the_gpus_own():
    code = (
        "sm_80 code, assembled for sm_90, on Fake 1: not the times of a GPU of compute "
        "capability 8.0"
    )
    native, foreign = every_table(document()), every_table(of_other_code())
    assert [table.title for table in foreign] == [f"{table.title} ({code})" for table in native]
    assert not any("sm_" in table.title for table in native)


def test_times_that_may_include_waits_for_the_host():
    changed = document()
    assert waits(changed).rows == []
    run = changed["cases"]["speed d64 full n2048"]["runs"]["factored"]
    run["both"]["waited"], run["forward"]["waited"] = 3, 0
    (found,) = waits(changed).rows
    assert found == ["factored", "forward and backward", "speed d64 full n2048", "3 of 15"]
    assert waits(changed) in every_table(changed)


def test_ratios():
    changed = document()
    changed["cases"]["speed d64 full n2048"]["runs"]["sdpa flash"]["forward"]["ms"] *= 2
    ran = PEERS[:3]  # of the full mask
    for which in PASSES:
        table = ratios(changed, FULL, which)
        assert table.head == ["tokens", *LENGTHS]
        assert column(table, "tokens") == [f"{s} to {p}" for s in SPECS for p in ran]
        doubled = "4.00" if which == "forward" else "2.00"
        assert row(table, "factored to sdpa flash") == ["2.00", "2.00", doubled, *["2.00"] * 4]
        assert set(row(table, "factored to sdpa efficient")) == {"4.00"}


def test_ratios_without_peers():
    alone = document()
    for case in alone["cases"].values():
        if case["part"] == "speed":
            case["runs"] = {name: run for name, run in case["runs"].items() if name in SPECS}
    assert ratios(alone, FULL).rows == []
    assert all(table.rows for table in every_table(alone))


def test_ranges_are_over_every_shape():
    changed = document()
    changed["cases"]["speed d128 causal n512"]["runs"]["sdpa flash"]["both"]["ms"] /= 4
    table = ranges(changed)
    assert column(table, "spec") == list(SPECS)
    assert set(column(table, "sdpa flash")) == {"0.50 to 2.00"}
    assert set(column(table, "sdpa cudnn")) == {"1.25 to 1.25"}
    assert set(column(table, "flash-attn-4")) == {"-"}


def test_memory_and_times():
    assert set(row(memory(document(), FULL), "sagebwd")) == {"200 / 900"}
    # 3.5 * 4 * 16384 tokens * 4096 * 2048 channels / 10^12
    assert row(times(document(), FULL), "sagebwd")[3] == "1.92 (0.5)"


def test_preparation_has_rows_of_our_specs():
    table = preparation(document(), FULL)
    assert column(table, "tokens") == list(SPECS)
    assert set(row(table, "factored")) == {"10.0%"}


def test_a_missing_measurement_has_a_dash_and_a_reason():
    changed = document()
    run = changed["cases"]["speed d64 full n512"]["runs"]["factored"]
    run |= {"jobs_ms": None, "saved_bytes": None, "not_measured": {"jobs_ms": "no profiler"}}
    assert row(preparation(changed, FULL), "factored") == ["-", *["10.0%"] * 6]
    assert row(memory(changed, FULL), "factored") == ["- / 900", *["200 / 900"] * 6]
    rows = not_run(changed).rows
    assert ["factored", "speed d64 full n512", "jobs_ms: no profiler"] in rows


def test_accuracy():
    table = accuracy(document(), "accuracy d64 causal sigma5")
    assert [row[0] for row in table.rows] == [*SPECS, "fpa_bf16", *PEERS[:3], "FlexAttention"]
    assert table.head == ["", "O", "dQ", "dK", "dV"]
    assert table.rows[0][1:] == ["0.0100"] * 4


def test_payoff():
    """Each site in INT8 and in 16 bit; the base has one of the two."""
    assert sigmas(document(), FULL) == [1.0, 5.0]
    table = payoff(document(), FULL, 1.0)
    assert column(table, "site") == list(PAYOFF_SITES)
    saved = dict(zip(PAYOFF_SITES, column(table, "time saved"), strict=True))
    assert saved.pop("dp") == "20.0%" and set(saved.values()) == {"10.0%"}
    errors = dict(zip(PAYOFF_SITES, column(table, "dQ"), strict=True))
    assert errors.pop("dp") == "0.0200 / 0.0100" and set(errors.values()) == {"0.0100 / 0.0100"}


def test_payoff_without_errors_or_without_a_time():
    changed = document()
    del changed["cases"]["accuracy d64 full sigma1"]
    del changed["cases"]["payoff d64 full n8192"]["runs"]["factored dq=input16"]
    table = payoff(changed, FULL, 1.0)
    assert "dq" not in column(table, "site") and set(column(table, "O")) == {"-"}


def test_not_run_is_grouped_by_reason():
    rows = {row[0]: row[1:] for row in not_run(document()).rows}
    where, why = rows["FlexAttention"]
    assert where.startswith("speed d64 full n512, speed d128 full n512") and why.endswith("room")
    assert "flash_attn" in rows["flash-attn-4"][1]


def test_in_every_case():
    changed = document()
    for case in changed["cases"].values():
        case["not_run"] = {"absent": "why"}
    assert not_run(changed).rows == [["absent", "every case", "why"]]


def test_every_table():
    tables = every_table(document())
    # memory, times, preparation; speed and ratios of three passes; errors; pay-off at two sigmas;
    # what did not run; ranges of ratios; times and ratios at shapes of models and of training
    # steps, what grouped queries cost, and the worst and the best shape; windows and padded keys
    assert len(tables) == (3 + 2 * 3) * 4 + 9 + 4 * 2 + 1 + 3 + 6 + 2
    for table in tables:
        assert table.rows and all(len(row) == len(table.head) for row in table.rows)


PARTS = ["speed", "payoff", "accuracy", "models", "masks", "training"]


@pytest.mark.parametrize("kept", [*PARTS, "nothing"])
def test_a_record_that_is_not_finished(kept):
    part = without(document(), *(each for each in PARTS if each != kept))
    assert (not every_table(part)) == (kept == "nothing")
