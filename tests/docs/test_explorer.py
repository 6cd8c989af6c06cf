"""The explorer page shows the emulator's numbers; it is tested in a browser."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import sagesim
from docs.build import explorer
from sagesim import FACTORED, SAGEBWD, SITES, AttentionSpec, Delta, Precision
from sagesim.analysis import OUTPUTS
from tests.docs.browser import Page, browse, find
from theory.checks.samples import Sample, gaussian, outlier_channels

INPUTS = {
    "sigma3": replace(gaussian(3.0, tokens=96, d=16), name="sigma 3"),
    "outliers": replace(outlier_channels(tokens=96, d=16), name="outliers"),
}
# One worker opens the page once for all tests.
pytestmark = pytest.mark.xdist_group("explorer")

needs_browser = pytest.mark.skipif(find() is None, reason="chromium is not installed")


def measured(sample: Sample, spec: AttentionSpec, against: str = "exact") -> dict[str, float]:
    traced = sample.trace(spec)
    own = sagesim.exact_backward(sample, traced)
    overall = sagesim.compare(traced, own if against == "own" else sample.exact()).overall
    return {t: overall[t].rel_l2 for t in OUTPUTS}


def any_spec(rng: random.Random) -> tuple[dict[str, Precision], dict[str, Any]]:
    levels = {site: rng.choice(explorer.LEVELS) for site in SITES}
    others = {
        "scales": rng.choice(list(explorer.SCALES)),
        "smoothing": rng.choice(list(explorer.SMOOTHING)),
        "delta": rng.choice(list(Delta)),
    }
    return levels, others


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return explorer.data(INPUTS)


class TestNumbers:
    @pytest.mark.parametrize("delta", Delta)
    def test_an_output_changes_exactly_with_the_products_that_it_depends_on(self, delta):
        sample = INPUTS["sigma3"]
        base = dict.fromkeys(SITES, Precision.INT8)
        others = {"scales": "tile", "smoothing": "k", "delta": delta}
        before = sample.trace(explorer.spec_of(base, **others))
        for site in SITES:
            after = sample.trace(explorer.spec_of(base | {site: Precision.INPUT16}, **others))
            for t in OUTPUTS:
                same = bool((getattr(before, t) == getattr(after, t)).all())
                assert same == (site not in explorer.READS[delta][t]), (site, t)

    @pytest.mark.slow
    def test_numbers_of_any_spec_are_the_emulators(self, found):
        rng = random.Random(0)
        for _ in range(40):
            name = rng.choice(list(INPUTS))
            levels, others = any_spec(rng)
            against = rng.choice(list(explorer.REFERENCES))
            direct = measured(INPUTS[name], explorer.spec_of(levels, **others), against)
            listed = found["errors"][".".join([name, *map(str, others.values()), against])]
            for t in OUTPUTS:
                read = found["reads"][others["delta"]][t]
                value = listed[t][explorer._index(levels, read)]
                # The page stores four digits, and a batch may be summed in another order.
                assert value == pytest.approx(direct[t], rel=1e-3), (levels, others, t)

    @pytest.mark.slow
    def test_presets_are_those_of_sagesim(self, found):
        for scales, preset in (("tile", SAGEBWD), ("factored", FACTORED)):
            p = found["presets"][scales]
            levels = {site: Precision(level) for site, level in p["levels"].items()}
            spec = explorer.spec_of(
                levels, scales=scales, smoothing=p["smoothing"], delta=Delta(p["delta"])
            )
            assert spec == preset


@pytest.fixture(scope="module")
def address(found, tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer.standalone(found))
    return path.as_uri()


@pytest.fixture
def page(address) -> Iterator[Page]:
    with browse() as page:
        page.open(address)
        yield page
        assert page.errors == []


def shown(page: Page) -> dict[str, float]:
    texts = {t: page.run(f"document.getElementById('ex-value-{t}').textContent") for t in OUTPUTS}
    return {t: math.inf if text == "overflow" else float(text) for t, text in texts.items()}


def label(page: Page) -> str:
    return page.run("document.getElementById('ex-label').textContent")


def assert_shows(page: Page, sample: Sample, against: str = "exact") -> None:
    """Assert that the numbers on the page are the emulator's for the label on the page."""
    direct = measured(sample, AttentionSpec.parse(label(page)), against)
    for t, value in shown(page).items():
        assert value == pytest.approx(direct[t], rel=6e-3), (label(page), t)


@pytest.mark.slow
@needs_browser
class TestPage:
    def test_the_page_starts_with_sagebwd(self, page):
        assert label(page) == "sagebwd"
        assert_shows(page, INPUTS["sigma3"])

    def test_the_fragment_of_the_address_sets_the_spec(self, page, address):
        rng = random.Random(1)
        for _ in range(12):
            name = rng.choice(list(INPUTS))
            levels, others = any_spec(rng)
            page.open(f"{address}#{urlencode({'input': name} | levels | others)}")
            assert AttentionSpec.parse(label(page)) == explorer.spec_of(levels, **others)
            assert_shows(page, INPUTS[name])

    def test_a_click_changes_the_reference_and_a_preset_keeps_it(self, page):
        page.click("input[name=ex-against][value=own]")
        assert_shows(page, INPUTS["sigma3"], "own")
        page.click(".ex-presets button:nth-of-type(3)")
        assert label(page) == "factored"
        assert_shows(page, INPUTS["sigma3"], "own")
        assert "against=own" in page.run("location.hash")

    def test_unknown_words_in_the_address_are_ignored(self, page, address):
        page.open(f"{address}#qk=int4&input=none&scales=&dp=int8&nothing")
        assert AttentionSpec.parse(label(page)) == sagesim.SAGEBWD_ALL_INT8

    def test_clicks_change_the_spec(self, page):
        before = shown(page)
        page.click("input[name=ex-pv][value=input16]")
        assert label(page) == "sagebwd pv=input16"
        assert "pv=input16" in page.run("location.hash")
        assert_shows(page, INPUTS["sigma3"])
        assert shown(page)["o"] != before["o"] and shown(page)["dv"] == before["dv"]
        for name, value in (
            ("scales", "factored"),
            ("smoothing", "qk"),
            ("delta", "p"),
            ("dp", "fp8_e4m3"),
            ("input", "outliers"),
        ):
            page.click(f"input[name=ex-{name}][value={value}]")
        assert AttentionSpec.parse(label(page)) == AttentionSpec.parse(
            "factored pv=input16 dp=fp8_e4m3 smooth=qk"
        )
        assert_shows(page, INPUTS["outliers"])
        page.click(".ex-presets button:nth-of-type(3)")
        assert label(page) == "factored"
        assert page.run("document.querySelectorAll('[aria-pressed=true]').length") == 1

    def test_the_keyboard_changes_the_spec(self, page):
        page.run("document.querySelector('input[name=ex-qk]:checked').focus()")
        page.press("ArrowRight", 39)
        assert label(page) == "sagebwd qk=fp8_e4m3"
        assert_shows(page, INPUTS["sigma3"])
        page.press("Tab", 9)
        assert page.run("document.activeElement.name") == "ex-pv"
        page.press("ArrowLeft", 37)
        assert label(page) == "sagebwd qk=fp8_e4m3 pv=input16"

    def test_effects_are_those_of_one_product_in_16_bit(self, page):
        row = "document.querySelector('[data-switch={}]').closest('tr')"
        for switch, words in (
            ("pv", "pv=input16"),
            ("dq", "dq=input16"),
            ("qk", "qk=input16 qk_recompute=input16"),
        ):
            texts = page.run(
                f"[...{row.format(switch)}.querySelectorAll('.ex-effect')].map(c => c.textContent)"
            )
            before = measured(INPUTS["sigma3"], SAGEBWD)
            after = measured(INPUTS["sigma3"], AttentionSpec.parse(f"sagebwd {words}"))
            for t, text in zip(OUTPUTS, texts, strict=True):
                sign, digits = text[0], text[1:].removesuffix("\u00a0%")
                value = 0.0 if text == "\u00b7" else float(digits) * (1 if sign == "+" else -1)
                assert value == pytest.approx(100 * (after[t] / before[t] - 1), abs=0.6), t
