"""The rates of each card give the figures that its source prints."""

import pytest

from sagesim_kernels.cards import CARDS, WHITEPAPERS


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


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_rates_of_wgmma_are_those_of_the_source(name: str):
    card = CARDS[name]
    clocks = card.multiprocessors * card.boost_ghz / 1e3
    assert card.flop_16_wgmma * clocks == pytest.approx(989.4, rel=0.001)
    assert card.flop_int8_wgmma * clocks == pytest.approx(1978.9, rel=0.001)


def test_every_card_names_its_sources():
    for card in CARDS.values():
        assert card.sources
        assert set(card.sources) <= set(WHITEPAPERS)


def test_a_geforce_has_half_the_rate_of_16_bit_products():
    assert {card.name for card in CARDS.values() if card.is_consumer} == {
        "RTX 3090",
        "RTX 4090",
        "RTX 5090",
    }
    assert CARDS["RTX 4090"].flop_16 * 2 == CARDS["L40S"].flop_16
