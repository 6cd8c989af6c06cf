"""The rates of each card give the figures that its source prints."""

import pytest

from sagesim_kernels.cards import BASES, CARDS, SOURCES


@pytest.mark.parametrize(
    ("name", "tflops_16", "tops_int8"),
    [
        ("A100", 312, 624),
        ("RTX 3090", 71, 284),
        ("RTX 4090", 165.2, 660.6),
        ("RTX 5090", 209.5, 838),
        ("L40S", 366, 733),  # the data sheet's 362 is at 2.49 GHz
    ],
)
def test_rates_are_those_of_the_source(name: str, tflops_16: float, tops_int8: float):
    assert CARDS[name].tflops_16 == pytest.approx(tflops_16, rel=0.003)
    assert CARDS[name].tops_int8 == pytest.approx(tops_int8, rel=0.003)


def test_mma_sync_of_hopper_is_slower_than_wgmma_and_not_than_an_a100_per_card():
    for name in ("H100", "H200"):
        assert CARDS["A100"].tflops_16 < CARDS[name].tflops_16 < 989 / 2
        assert CARDS["A100"].tops_int8 < CARDS[name].tops_int8 < 1979 / 2


def test_the_l2_cache_of_an_rtx_card_scales_with_its_memory_interface():
    bits = {"RTX 3090": 384, "RTX 4090": 384, "RTX 5090": 512, "L40S": 384}
    rates = {CARDS[name].l2_bytes * CARDS[name].multiprocessors / bits[name] for name in bits}
    assert max(rates) == pytest.approx(min(rates))


def test_every_figure_names_its_source():
    groups = set(CARDS["A100"].sources)
    assert len(groups) == 7
    for card in CARDS.values():
        assert set(card.sources) == groups
        assert set(card.sources.values()) <= set(SOURCES)
    used = {key for card in CARDS.values() for key in card.sources.values()}
    assert used == set(SOURCES)
    assert {source.basis for source in SOURCES.values()} == set(BASES)


def test_a_geforce_has_half_the_rate_of_16_bit_products():
    assert {card.name for card in CARDS.values() if card.is_consumer} == {
        "RTX 3090",
        "RTX 4090",
        "RTX 5090",
    }
    assert CARDS["RTX 4090"].flop_16 * 2 == CARDS["L40S"].flop_16
