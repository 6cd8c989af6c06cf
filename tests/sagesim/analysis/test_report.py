import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from sagesim import FPA, SAGEBWD, AttentionSpec, Attribution, attribute
from sagesim.analysis import TENSORS, TITLES, gradient_error, pool, pool_errors
from sagesim.analysis.attribution import OUTPUTS
from sagesim.analysis.metrics import SITE_NAMES
from sagesim.analysis.report import Layer, advice, headline, number, percent, render
from sagesim.models import Call, Capture
from sagesim.spec import PRESETS

ROOT = Path(__file__).parents[3]

MARKUP = "<script>alert('&\"')</script>"
VOID = {"meta", "link", "br", "hr", "img", "input", "col", "wbr"}


class Page(HTMLParser):
    """Collects the tables, attributes and text of a page. Fails if tags are not balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.tags, self.attributes = [], {}, [], []
        self.words, self.ids = [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        attrs = dict(attrs)
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag == "table":
            self.rows = self.tables[attrs["id"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def call(index, **changes):
    generator = torch.Generator().manual_seed(index)
    q, k, v, do = torch.randn(4, 1, 2, 40, 8, generator=generator)
    fields = {
        "q": q * 2,
        "k": k,
        "v": v + 1,
        "do": do,
        "attn_mask": None,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
        "index": index,
        "name": f"{MARKUP} {index}",
    }
    return Call(**(fields | changes))


def layers_of(calls, spec):
    return [Layer(c, attribute(c, base=spec)) for c in calls]


def page_of(spec=SAGEBWD, calls=None):
    calls = (call(0), call(5)) if calls is None else calls
    capture = Capture(
        calls=tuple(calls),
        loss_scale=1024.0,
        source={"model": MARKUP, "list": [1, {"a": MARKUP}]},
        torch_version=MARKUP,
    )
    layers = layers_of(calls, spec)
    command = f"sagesim attribute {MARKUP}"
    return layers, render(layers, capture=capture, name=MARKUP, command=command)


@pytest.fixture(scope="module")
def made():
    layers, text = page_of()
    return layers, text, Page(text)


def test_nothing_is_loaded_from_outside(made):
    _, text, page = made
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "://" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    loads = {value for name, value in page.attributes if name in ("src", "href", "xlink:href")}
    assert all(value.startswith("#") for value in loads)
    assert {value[1:] for value in loads} <= set(page.ids)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_values_from_files_are_escaped(made):
    _, text, page = made
    assert MARKUP not in text
    for shown in (f"sagesim attribute {MARKUP}", f"PyTorch {MARKUP}", f"{MARKUP} 5"):
        assert shown in page.text


def test_ids_are_unique_and_labels_refer_to_existing_ids(made):
    _, _, page = made
    assert len(set(page.ids)) == len(page.ids)
    refers = [v.split() for name, v in page.attributes if name == "aria-labelledby"]
    assert {x for ids in refers for x in ids} <= set(page.ids)


@pytest.mark.parametrize(
    "words",
    [
        "error with only this product rounded",
        "error with all other products rounded",
        "error with this option changed",
    ],
)
def test_the_report_the_terminal_and_the_page_use_the_same_words(made, words):
    layers, text, _ = made
    assert f"<caption>Relative L2 {words}</caption>" in text
    assert f"\n{words}\n" in str(layers[0].attribution)
    assert words in (ROOT / "docs" / "report.md").read_text(encoding="utf-8").lower()
    assert f'"{words}"' in (ROOT / "sagesim" / "cli" / "attribute.py").read_text(encoding="utf-8")


def test_every_table_has_a_caption_and_full_rows(made):
    _, _, page = made
    assert page.tags.count("caption") == page.tags.count("table") == len(page.tables)
    for name, rows in page.tables.items():
        assert len({len(r) for r in rows}) == 1, name


def test_the_page_shows_headline_and_advice(made):
    layers, _, page = made
    pooled = pool([layer.attribution for layer in layers])
    assert headline(pooled).replace(" = ", "\xa0=\xa0") in "".join(page.words)
    for item in advice(pooled):
        assert item.sentence in page.text
        assert item.label is None or f'--spec "{item.label}"' in page.text


def test_tables_have_the_numbers_of_the_pooled_attribution(made):
    layers, _, page = made
    a = pool([layer.attribution for layer in layers])
    shares = page.tables["table-shares"]
    assert shares[0][1:] == [TITLES[t] for t in OUTPUTS]
    for cells, effect in zip(shares[1:-1], a.parts, strict=True):
        assert SITE_NAMES[effect.site] in cells[0]
        assert cells[1:] == [percent(effect.share[t]) for t in OUTPUTS]
    assert shares[-1][1:] == [percent(a.interaction(t)) for t in OUTPUTS]
    base = [number(a.error[t]) for t in OUTPUTS]
    own, rows = a.own_forward, page.tables["table-own"]
    for cells, effect in zip(rows[1:-3], own.parts, strict=True):
        assert cells[1:] == [percent(effect.share[t]) for t in OUTPUTS]
    assert rows[-3][1:] == [percent(own.interaction(t)) for t in OUTPUTS]
    assert rows[-2][1:] == [number(own.error[t]) for t in OUTPUTS] != base
    assert rows[-1][1:] == base
    for kind in ("only", "without"):
        rows = page.tables[f"table-{kind}"]
        for cells, effect in zip(rows[1:-1], (a.logits, *a.sites), strict=True):
            assert cells[1:] == [number(getattr(effect, kind)[t]) for t in OUTPUTS]
        assert rows[-1][1:] == base
    switches = page.tables["table-switches"]
    for cells, effect in zip(switches[1:-1], a.switches, strict=True):
        assert cells[1:-1] == [number(effect.error[t]) for t in OUTPUTS]
    assert switches[-1][1:-1] == base


def test_tables_by_layer_have_the_numbers_of_each_layer(made):
    layers, _, page = made
    for name, of in (
        ("table-layers", lambda x: [number(x.attribution.error[t]) for t in OUTPUTS]),
        (
            "table-gradient-shares",
            lambda x: [
                percent(Attribution.gradient_share(x.attribution, effect))
                for effect in x.attribution.parts
            ],
        ),
        (
            "table-intermediates-by-layer",
            lambda x: [number(x.attribution.errors[t].rel_l2) for t in TENSORS],
        ),
    ):
        for cells, layer in zip(page.tables[name][1:], layers, strict=True):
            assert cells == [f"{layer.call.index} {layer.call.name}", *of(layer)]


def test_the_table_of_intermediates_has_the_pooled_errors(made):
    layers, _, page = made
    pooled = pool_errors([layer.attribution.errors for layer in layers])
    for cells, t in zip(page.tables["table-intermediates"][1:], TENSORS, strict=True):
        e = pooled[t]
        assert cells[1:] == [
            number(e.rel_l2),
            f"{e.cosine:.5f}",
            number(e.sqnr_db),
            number(e.max_error),
        ]


def test_the_spec_is_described_in_words(made):
    _, _, page = made
    rows = {cells[0]: cells[1:] for cells in page.tables["table-spec"][1:]}
    assert rows["pv"][2:] == [
        "INT8",
        "P: one per query row of a tile",
        "V: one per block of tokens",
    ]
    assert rows["dp"][2:] == ["16 bit", "no scales", "no scales"]
    assert rows["dv"][4] == "dO: one per block of tokens"


@pytest.mark.parametrize(
    "label",
    [
        *PRESETS,
        "sagebwd delta=p smooth=qk round=stochastic@7 block=16x8 dq=fp8_e4m3",
        "factored dk=int8@row,head",
    ],
)
def test_any_spec_can_be_reported(label):
    spec = AttentionSpec.parse(label)
    _, text = page_of(spec, [call(0)])
    assert spec.label() in Page(text).text


@pytest.mark.parametrize(
    "changes",
    [
        {"do": torch.zeros(1, 2, 40, 8)},
        {"v": torch.zeros(1, 2, 40, 8)},
        {"q": torch.zeros(1, 2, 40, 8)},
        {"is_causal": True},
        {"attn_mask": torch.zeros(1, 1, 40, 40, dtype=torch.bool)},
        {"k": torch.ones(1, 1, 40, 8), "v": torch.ones(1, 1, 40, 8), "enable_gqa": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_any_problem_can_be_reported(changes):
    _, text = page_of(SAGEBWD, [call(0, **changes)])
    Page(text)


def test_the_advice_is_the_best_of_all_single_changes():
    c = call(0)
    a = attribute(c.q, c.k, c.v, c.do)
    product, *switches = advice(a)
    tried = attribute(c.q, c.k, c.v, c.do, base=AttentionSpec.parse(product.label))
    best = min(gradient_error(e.without) for e in a.parts)
    assert abs(gradient_error(tried.error) / best - 1) < 0.02
    assert best < 0.9 * gradient_error(a.error)
    for switch in switches:
        changed = attribute(c.q, c.k, c.v, c.do, base=AttentionSpec.parse(switch.label))
        assert gradient_error(changed.error) == min(gradient_error(e.error) for e in a.switches)


def test_there_is_no_advice_if_nothing_is_rounded():
    c = call(0)
    a = attribute(c.q, c.k, c.v, c.do, base=FPA)
    assert advice(a) == []
    assert "No product is rounded" in headline(a)


@pytest.mark.parametrize(
    "x, shown",
    [
        (0.0, "0"),
        (0.02, "0.0200"),
        (-0.5, "-0.500"),
        (1e-3, "0.00100"),
        (9.234e-8, "9.2e-8"),
        (140.7, "141"),
        (1234.0, "1.2e3"),
        (float("inf"), "∞"),
        (float("nan"), "not a number"),
    ],
)
def test_numbers_have_three_digits_or_an_exponent(x, shown):
    assert number(x) == shown


@pytest.mark.parametrize(
    "x, shown", [(0.624, "62%"), (-0.031, "\N{MINUS SIGN}3%"), (-0.001, "0%"), (1.0, "100%")]
)
def test_percents_are_whole_with_a_true_minus_sign(x, shown):
    assert percent(x) == shown
