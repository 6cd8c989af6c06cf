"""Figures of a record with known numbers."""

import math

import pytest

pytest.importorskip("matplotlib")
import matplotlib as mpl

mpl.use("agg")

from sagesim_kernels.bench.cases import PAYOFF_SITES, PEERS, SPECS
from sagesim_kernels.bench.plots import figures, frontier, payoff, ratios, times
from sagesim_kernels.bench.tables import frontier_of, frontier_points
from tests.sagesim_kernels.bench.documents import document, of_other_code


@pytest.fixture(autouse=True)
def own_style():
    """Figures are drawn in matplotlib's own style: other tests may have set another."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.use("agg")
        yield


def test_figures_of_every_peer_that_ran():
    assert list(figures(document())) == [
        "time",
        "ratio_sdpa_flash",
        "ratio_sdpa_cudnn",
        "ratio_sdpa_efficient",
        "ratio_FlexAttention",
        "frontier",
        "payoff",
    ]


def test_figures_name_the_code_if_it_is_not_the_gpus_own():
    assert {figure.get_supxlabel() for figure in figures(document()).values()} == {""}
    for figure in figures(of_other_code()).values():
        assert figure.get_supxlabel().startswith("sm_80 code, assembled for sm_90, on Fake 1: not")


def test_times_are_those_of_the_record():
    panels = times(document()).axes
    assert [axes.get_title() for axes in panels] == [
        f"head size {d}, {mask} mask" for d in (64, 128) for mask in ("full", "causal")
    ]
    lines = {line.get_label(): line for line in panels[0].get_lines()}
    assert list(lines) == [*SPECS, *PEERS[:3], "FlexAttention"], "flash-attn-4 ran at no shape"
    x, y = lines["sdpa flash"].get_data()
    assert list(x) == [2**i for i in range(9, 16)]
    assert y[3] == pytest.approx(2 * 3.5 * 4 * 16384 * 4096 * 2048 / 1e12)
    assert not len(lines["FlexAttention"].get_xdata())


def test_ratios_to_a_peer():
    for axes in ratios(document(), "sdpa cudnn").axes:
        lines = [line for line in axes.get_lines() if line.get_label() in SPECS]
        assert len(lines) == len(SPECS)
        for line in lines:
            assert list(line.get_ydata()) == pytest.approx([1.25] * 7)


def test_times_and_errors_of_every_contender():
    made = document()
    for key, size in (("sigma1", 0.01), ("sigma5", 0.04)):
        for name, errors in made["cases"][f"accuracy d64 causal {key}"]["errors"].items():
            errors.update(dq=size, dk=size, dv=size) if name == "sagebwd" else None
        del made["cases"][f"accuracy d64 full {key}"]
    points = {point.name: point for point in frontier_points(made, 64)}
    assert list(points) == [*SPECS, *PEERS[:3], "FlexAttention"]
    assert points["sdpa cudnn"].time == 1.0
    assert points["sagebwd"][1:] == pytest.approx((0.8, 0.02, 0.8, 0.8, 0.01, 0.04))
    labels = frontier(made).legends[0].get_texts()
    assert [text.get_text() for text in labels] == list(points)


def test_the_frontier_is_what_nothing_else_is_faster_and_more_accurate_than():
    (point, *_) = frontier_points(document(), 64)

    def at(name, time, error):
        return point._replace(name=name, time=time, error=error)

    points = [at("slow", 3, 0.1), at("good", 2, 0.1), at("fast", 1, 0.5), at("bad", 1.5, 0.6)]
    nearly = at("nearly as good", 2.5, 0.0995)
    assert [p.name for p in frontier_of([*points, nearly])] == ["fast", "good"]


def test_payoff():
    saved, grown = payoff(document()).axes[:2]
    dp = PAYOFF_SITES.index("dp")
    for container in saved.containers:
        assert [bar.get_width() for bar in container] == pytest.approx(
            [20.0 if i == dp else 10.0 for i in range(8)]
        )
    for container in grown.containers:
        assert [bar.get_width() for bar in container] == pytest.approx(
            [2.0 if i == dp else 1.0 for i in range(8)]
        )


def test_a_site_that_was_not_run_has_no_bar():
    changed = document()
    del changed["cases"]["payoff d64 full n8192"]["runs"]["factored dq=input16"]
    del changed["cases"]["accuracy d64 full sigma1"]["errors"]["factored dq=input16"]
    saved, grown = payoff(changed).axes[:2]
    dq = PAYOFF_SITES.index("dq")
    assert math.isnan(saved.containers[0][dq].get_width())
    assert math.isnan(grown.containers[0][dq].get_width())


@pytest.mark.parametrize("kept", ["speed", "payoff", "accuracy"])
def test_a_record_that_is_not_finished(kept):
    part = document()
    part["cases"] = {key: c for key, c in part["cases"].items() if c["part"] == kept}
    drawn = figures(part)
    assert ("time" in drawn) == (kept == "speed") and "payoff" not in drawn


@pytest.mark.slow
def test_figures_can_be_saved(tmp_path):
    for name, figure in figures(document()).items():
        figure.savefig(tmp_path / f"{name}.png", dpi=40)
    assert len(list(tmp_path.iterdir())) == 7
