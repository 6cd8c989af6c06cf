import json
import re

import numpy as np
import pytest

from sagesim.experiments.pretrain.report import tables
from sagesim.experiments.pretrain.report.chart import (
    HEIGHT,
    WIDTH,
    Line,
    line_chart,
    ticks,
    ticks_log,
)
from sagesim.experiments.pretrain.report.compare import (
    Group,
    Setting,
    TrainedRun,
    difference,
    group_runs,
    layer_errors,
    over_seeds,
    pooled_error,
    seed_deviation,
    smoothed,
)
from sagesim.experiments.pretrain.report.difference import Difference
from sagesim.experiments.pretrain.report.page import headline, render
from sagesim.experiments.pretrain.report.tables import gradient_rows
from sagesim.experiments.pretrain.run.log import Log, LogWriter
from tests.docs.browser import browse, find
from tests.sagesim.analysis.test_report import MARKUP, Page

LOSSES = {"sdpa": 3.0, "emulator:sagebwd": 3.05, "emulator:factored": 3.001}


def made(folder, run, *, loss, stop="", name=None):
    """Write the log of a run with losses that fall to `loss`, and read it."""
    log = LogWriter(folder, run, {"device": MARKUP, "torch": "2"})
    for step in range(1, run.steps + 1):
        value = loss + (run.steps - step) * 0.1 + 0.01 * run.seed
        log.add(step, "train", {"loss": value, "tokens_per_second": 1e6})
        log.add(step, "evaluation", {"loss": value})
    for layer in range(3):
        rms = {"sigma_q": 1.0 + layer, "rms_p": 1e-2, "gamma_q_rms": 1.5}
        log.add(run.steps, "layer", rms, layer=layer)
        for attention in run.monitor:
            errors = {
                f"{t}_{m}": (0.99 if m == "cosine" else 0.01 * 4**layer)
                for t in ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
                for m in ("cosine", "rel_l2")
            }
            log.add(run.steps, "layer", errors, attention=attention, layer=layer)
    square = {"square": 2.0, "square_error": 0.1, "trace": 8.0, "noise_scale": 4.0}
    log.add(run.steps, "gradient", square)
    for attention in run.monitor:
        bias = {"bias_square": 0.02, "bias_square_error": 0.001, "bias_trace": 1.0}
        bias |= {"bias_along": -0.05, "visible": 450.0}
        log.add(run.steps, "gradient", bias, attention=attention)
    if stop:
        log.set_stop(stop)
    log.save()
    return TrainedRun(name or folder.name, Log.read(folder))


@pytest.fixture
def runs(make_run, tmp_path):
    found = []
    for per_step in (256, 64):
        for attention, loss in LOSSES.items():
            for seed in (0, 1):
                run = make_run(
                    attention=attention,
                    tokens_per_step=per_step,
                    steps=5120 // per_step,
                    seed=seed,
                    monitor=("emulator:sagebwd", "emulator:factored"),
                )
                name = f"{attention}-{per_step}-{seed}"
                found.append(made(tmp_path / name, run, loss=loss))
    return found


def test_runs_are_grouped_by_the_settings_that_differ(runs):
    found = group_runs(runs)
    assert [s.title for s in found] == ["256 tokens per step", "64 tokens per step"]
    for setting in found:
        assert [g.attention for g in setting.groups] == ["sdpa", "sagebwd", "factored"]
        assert all(len(g.runs) == 2 for g in setting.groups)
    with pytest.raises(ValueError, match="are the same run"):
        group_runs([*runs, runs[0]])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_warmup_that_differs_between_equal_steps_is_a_setting(make_run, tmp_path, seed):
    short, long = (
        made(tmp_path / name, make_run(attention="sdpa", warmup=warmup, seed=seed_), loss=3.0)
        for name, warmup, seed_ in (("a", 1, 0), ("b", 2, seed))
    )
    found = group_runs([short, long])
    assert [(s.title, len(s.groups)) for s in found] == [("warmup 1", 1), ("warmup 2", 1)]
    assert [dict(s.fields) for s in found] == [{"warmup": 1}, {"warmup": 2}]


def test_a_warmup_that_follows_from_the_steps_is_no_setting(make_run, tmp_path):
    found = [
        made(
            tmp_path / f"{per_step}-{attention}",
            make_run(
                attention=attention,
                tokens_per_step=per_step,
                steps=5120 // per_step,
                warmup=1280 // per_step,
            ),
            loss=3.0,
        )
        for per_step in (256, 64)
        for attention in ("sdpa", "emulator:sagebwd")
    ]
    assert len({each.run.warmup for each in found}) == 2
    titles = [setting.title for setting in group_runs(found)]
    assert titles == ["256 tokens per step", "64 tokens per step"]


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), -0.01])
def test_a_margin_that_is_no_size_gives_no_verdict(margin):
    with pytest.raises(ValueError, match=f"margin={margin} is not a finite number of at least 0"):
        Difference(0.03, 0.02, 0.04, 2).verdict(margin)


def test_differences_are_paired_by_seed(runs):
    setting = group_runs(runs)[0]
    reference, sagebwd, factored = setting.groups
    found = difference(setting, sagebwd)
    assert found.mean == pytest.approx(0.05) and found.seeds == 2
    assert found.low == pytest.approx(found.high)
    assert found.verdict(0.02) == "worse" and found.verdict(0.06) == "within the margin"
    assert difference(setting, factored).verdict(0.02) == "within the margin"
    assert difference(setting, reference) is None
    assert Difference(0.03, -0.01, 0.07, 2).verdict(0.02) == "seeds disagree"
    assert Difference(-0.03, -0.04, -0.02, 2).verdict(0.02) == "better"


def test_the_error_of_a_mean_is_pooled_over_attentions(runs, monkeypatch):
    """Two attentions differ from sdpa by 1, 3 and by 0, 6: their variances are 2 and 18."""
    finals = {"sdpa": {0: 5.0, 1: 5.0}, "sagebwd": {0: 6.0, 1: 8.0}, "factored": {0: 5.0, 1: 11.0}}
    monkeypatch.setattr(Group, "finals", property(lambda group: finals[group.attention]))
    setting = group_runs(runs)[0]
    first, second = (difference(setting, group) for group in setting.groups[1:])
    assert seed_deviation(setting) == (pytest.approx(10**0.5), 2)
    assert (first.mean, second.mean) == (2.0, 3.0)
    assert first.error == second.error == pytest.approx(5**0.5)
    assert first.degrees == second.degrees == 2 and first.is_chance


def test_a_difference_may_be_chance_below_the_quantile_of_student():
    """It is 12.71 errors with one degree of freedom, and 4.30 with two."""
    for degrees, quantile in ((1, 12.70620), (2, 4.302653), (10, 2.228139)):
        above, below = (
            Difference(x, x - 0.1, x + 0.1, 2, 1.0, degrees)
            for x in (quantile * 1.001, quantile * 0.999)
        )
        assert not above.is_chance and below.is_chance
        assert above.probability < 0.05 < below.probability
    assert Difference(50.0, -1.0, 101.0, 2, 1.0, 10).is_chance, "the seeds disagree on the sign"
    assert Difference(5.0, 4.0, 6.0, 1).is_chance, "there is no error"
    assert Difference(5.0, 4.0, 6.0, 1, 0.01).is_chance, "the error has no degrees of freedom"
    assert not Difference(5.0, 5.0, 5.0, 2, 0.0, 1).is_chance


def drawn(rng, monkeypatch, runs, attentions, seeds):
    """A setting whose final losses are drawn by chance alone."""
    names = ["sdpa", *(f"a{i}" for i in range(attentions))]
    finals = {name: dict(enumerate(rng.normal(3.0, 0.01, seeds).tolist())) for name in names}
    monkeypatch.setattr(Group, "finals", property(lambda group: finals[group.attention]))
    return Setting("", tuple(Group(name, tuple(runs[:1])) for name in names))


@pytest.mark.parametrize("attentions, seeds", [(1, 2), (4, 2), (4, 4)])
def test_the_headline_seldom_calls_chance_a_difference(attentions, seeds, runs, monkeypatch):
    """At most in 0.05 of all reports: of 2000 draws, in 139 within four standard deviations."""
    rng = np.random.default_rng(0)
    found = sum(
        "No attention differs"
        not in headline([drawn(rng, monkeypatch, runs, attentions, seeds)], None)
        for _ in range(2000)
    )
    assert found <= 139


def test_the_headline_of_one_seed_names_no_difference(make_run, tmp_path):
    every = [
        made(tmp_path / "a", make_run(), loss=3.0),
        made(tmp_path / "b", make_run(attention="emulator:sagebwd"), loss=3.0003),
    ]
    assert headline(group_runs(every), None).startswith("One seed does not tell")


def test_curves_over_seeds_have_the_points_that_all_seeds_have():
    assert over_seeds([{1: 2.0, 2: 4.0}, {1: 4.0, 3: 0.0}]) == [(1.0, 2.0, 3.0, 4.0)]
    assert over_seeds([]) == []
    assert smoothed({x: float(x) for x in range(120)}, bins=60)[1] == 0.5


def test_errors_are_pooled_over_layers(runs):
    group = group_runs(runs)[0].groups[0]
    errors = [p[2] for p in layer_errors(group, "emulator:sagebwd", "dq_rel_l2")]
    assert errors == pytest.approx([0.01, 0.04, 0.16])
    assert pooled_error(group, "emulator:sagebwd", "dq") == pytest.approx((0.99, 0.04))
    assert pooled_error(group, "emulator:causal_safe", "dq") is None


@pytest.mark.parametrize("sequences, doubt", [(255, ", unreliable"), (256, "")])
def test_errors_from_few_sequences_are_marked(make_run, tmp_path, sequences, doubt):
    run = make_run(monitor=("emulator:sagebwd",), monitor_sequences=sequences)
    page = Page(render([made(tmp_path / "a", run, loss=3.0)], margin=0.02, command=""))
    rows = [row for row in page.tables["table-gradient"] if "0.0100" in row]
    assert [row[row.index("0.0100") + 1] for row in rows] == [f"5.0e-4{doubt}"]
    assert "unreliable if fewer than 256 sequences were measured" in page.text


def test_runs_that_measured_other_numbers_of_sequences_are_compared(make_run, tmp_path):
    """And their errors are as reliable as those from the fewest sequences."""
    every = [
        made(
            tmp_path / f"{attention[-4:]}{seed}",
            make_run(
                attention=attention,
                seed=seed,
                monitor=("emulator:sagebwd",),
                monitor_sequences=sequences,
            ),
            loss=3.0,
        )
        for attention, *each in (("sdpa", 256, 8), ("emulator:sagebwd", 256, 256))
        for seed, sequences in enumerate(each)
    ]
    (setting,) = group_runs(every)
    assert [group.attention for group in setting.groups] == ["sdpa", "sagebwd"]
    cells = {row["attention"]: row["cells"] for row in gradient_rows([setting])}
    assert cells["sdpa"][2] == "5.0e-4, unreliable" and cells["sagebwd"][2] == "5.0e-4"


@pytest.mark.parametrize("square, of_g", [(-0.25, -0.5), (0.25, -0.5), (-0.25, 0.5), (0.25, 0.0)])
def test_a_share_of_estimates_that_are_not_positive_is_not_resolved(
    square, of_g, make_run, tmp_path, monkeypatch
):
    measured = {"square": of_g, "noise_scale": float("inf")}
    bias = {"bias_square": square, "bias_square_error": 0.1, "bias_along": 0.0, "visible": 1.0}
    monkeypatch.setattr(tables, "gradient_numbers", lambda _group, name: bias if name else measured)
    run = make_run(monitor=("emulator:sagebwd",))
    (row,) = gradient_rows(group_runs([made(tmp_path / "a", run, loss=3.0)]))
    assert row["cells"][1] == "not resolved"
    assert (row["cells"][2] != "") == (of_g > 0)


def test_the_page_holds_the_numbers(runs):
    page = Page(render(runs, margin=0.02, command=MARKUP))
    assert page.text.count(MARKUP) == 1 + len(runs)
    finals = page.tables["table-final"]
    assert finals[1] == ["256 tokens per step"]
    assert finals[3][:4] == ["sagebwd", "2 of 2", "3.0550", "+0.0500"]
    assert finals[3][6] == "worse" and finals[4][6] == "within the margin"
    intermediates = page.tables["table-intermediates"]
    assert intermediates[1] == ["Trained with sdpa, 256 tokens per step"]
    assert intermediates[2][1:] == ["cosine", *["0.9900"] * 8]
    assert intermediates[3][1:] == ["relative L2", *["0.0400"] * 8]
    assert intermediates[-1][-1] == "0.0540"
    gradient = page.tables["table-gradient"][2]
    assert gradient[2:] == [
        "128",
        "0.0100",
        "5.0e-4, unreliable",
        "\N{MINUS SIGN}0.0500",
        "14K",
        "256",
    ]
    tensors = page.tables["table-tensors"][2]
    assert tensors[1] == "1.00 to 3.00"
    assert len(page.tables["table-runs"]) == 1 + len(runs)
    said = "The final loss of sagebwd differs by +0.0500 nats from that of 16-bit attention"
    assert said in page.text
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [v for _, v in page.attributes if v and re.match("https?:", v)]
    assert len(page.ids) == len(set(page.ids))


def test_every_attention_has_a_curve_in_every_setting(runs):
    text = render(runs, margin=None, command="")
    for kind in ("evaluation", "train"):
        for index in range(2):
            chart = re.search(rf'<clipPath id="{kind}-{index}">.*?</svg>', text, re.DOTALL)[0]
            assert chart.count('class="line') == 3 and chart.count('class="spread') == 3
    assert text.count('class="margin"') == 0
    assert render(runs, margin=0.02, command="").count('class="margin"') == 2
    assert "Verdict" not in text


@pytest.mark.skipif(find() is None, reason="no chromium on this machine")
def test_it_opens_in_a_browser(runs, tmp_path):
    """Lines are inside their charts and have colours; the page is not wider than the window."""
    path = tmp_path / "report.html"
    path.write_text(render(runs, margin=0.02, command=""), encoding="utf-8")
    with browse() as page:
        page.open(path.as_uri())
        shown = page.run(
            "JSON.stringify([...document.querySelectorAll('svg.chart .line')].map(e => {"
            "const a = e.getBoundingClientRect(), b = e.closest('svg').getBoundingClientRect();"
            "return [getComputedStyle(e).stroke, a.width > b.width / 2 && b.height > 100]; }))"
        )
        wide = page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == [] and wide
    lines = json.loads(shown)
    # Two settings. Each has three lines of held-out loss, three of training loss, two of
    # differences, and two measured attentions in four tensors.
    assert len(lines) == 2 * (3 + 3 + 2 + 2 * 4)
    assert all(stroke.startswith("rgb") and drawn for stroke, drawn in lines), lines


def test_the_page_shows_runs_that_stopped_or_are_not_done(make_run, tmp_path):
    good = made(tmp_path / "a", make_run(), loss=3.0)
    stop = f"step 3: loss nan; first bad: {MARKUP}"
    bad = made(tmp_path / "b", make_run(attention="emulator:sagebwd"), loss=3.0, stop=stop)
    page = Page(render([good, bad], margin=0.02, command=""))
    assert stop in page.text
    row = page.tables["table-final"][2]
    assert row[1] == "0 of 1" and row[2] == "1 stopped"
    LogWriter(tmp_path / "c", make_run(seed=1), {}).save()
    page = Page(render([TrainedRun("c", Log.read(tmp_path / "c"))], margin=None, command=""))
    assert page.tables["table-final"][1][2] == "not done"
    assert "nothing was measured" in page.text
    with pytest.raises(ValueError, match="no runs"):
        render([], margin=None, command="")


def test_a_final_loss_that_is_not_finite_is_a_stop(make_run, tmp_path):
    """In a log of before such a loss stopped a run."""
    every = [
        made(tmp_path / f"{name}{seed}", make_run(attention=f"emulator:{name}", seed=seed), loss=x)
        for name, *each in (("sagebwd", 3.0, float("nan")), ("factored", 3.1, 3.1))
        for seed, x in enumerate(each)
    ]
    every += [made(tmp_path / f"sdpa{seed}", make_run(seed=seed), loss=3.0) for seed in range(2)]
    assert [x.final is None for x in every] == [False, True] + [False] * 4
    page = Page(render(every, margin=0.02, command=""))
    row = page.tables["table-final"][2]
    assert row[:3] == ["sagebwd", "1 of 2", "3.0000"] and row[-1].endswith("1 stopped")
    assert re.findall(r".{14}\bnan\b", page.text) == ["held-out loss nan"]


def test_a_headline_of_no_difference(runs):
    assert "No attention differs" in headline(group_runs(runs), 0.06)
    assert headline(group_runs(runs[:2]), 0.02) == "2 pretraining runs"


def test_a_chart_puts_points_at_the_right_place():
    line = Line(
        "x", 9, [(0.0, 1.0, 1.0, 1.0), (10.0, 3.0, 3.0, 3.0), (20.0, float("nan"), 1.0, 1.0)]
    )
    chart = line_chart(
        [line], title="<t>", x_title="x", y_title="y", identifier="i", y_range=(1.0, 3.0)
    )
    path = re.search(r'class="line c1 dashed" d="M([^"]*)"', chart)[1]
    (x0, y0), (x1, y1) = (tuple(map(float, point.split())) for point in path.split("L"))
    assert (x0, x1) == (62, WIDTH - 12) and (y0, y1) == (HEIGHT - 44, 12)
    assert "&lt;t&gt;" in chart and "<t>" not in chart


def test_ticks_are_round():
    assert ticks(-0.013, 0.052) == [0.0, 0.02, 0.04]
    assert ticks(3.1, 3.9) == [3.2, 3.4, 3.6, 3.8]
    assert ticks_log(0.003, 0.3) == [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
    assert ticks_log(1e-6, 1.0) == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
