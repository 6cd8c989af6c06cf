"""Tables, text and figures about the committed pretraining runs, for docs/pretraining.md.

docs/data/pretraining/NAME.parquet is the log of a run, as `sagesim pretrain` wrote it.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import plots
from matplotlib.axes import Axes

from sagesim.analysis import geometric_mean, mean
from sagesim.experiments.pretrain.plan.plan import Plan
from sagesim.experiments.pretrain.report.compare import (
    Group,
    Point,
    Setting,
    TrainedRun,
    difference,
    difference_curve,
    gradient_numbers,
    group_runs,
    layer_errors,
    pooled_error,
)
from sagesim.experiments.pretrain.report.page import render
from sagesim.experiments.pretrain.report.tables import tokens, with_error
from sagesim.experiments.pretrain.run.log import Log
from sagesim.files import write_text

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "docs" / "data" / "pretraining"
PLAN = ROOT / "sagesim" / "experiments" / "pretrain" / "plan" / "five_questions.toml"
MEASURED = ("kernels:sagebwd", "kernels:factored")
"""The attentions whose errors every run measured."""


@cache
def logs() -> list[TrainedRun]:
    """All committed runs, sorted by name."""
    return [TrainedRun(path.stem, Log.read(path)) for path in sorted(LOGS.glob("*.parquet"))]


def finals() -> str:
    """A Markdown table of the final held-out losses."""
    runs = logs()
    margin = Plan.read(PLAN).margin
    lines = [
        "| setting | attention | seeds | loss | from sdpa | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for setting in group_runs(runs):
        for group in setting.groups:
            losses, apart = list(group.finals.values()), difference(setting, group)
            title = setting.title if group is setting.groups[0] else ""
            lines.append(
                f"| {title} | `{group.attention}` | {len(losses)} of {len(group.runs)} | "
                + (f"{sum(losses) / len(losses):.4f}" if losses else "")
                + " | "
                + (f"{with_error(apart)} | {apart.verdict(margin)} |" if apart else "| |")
            )
    machines = sorted({each.log.about["device"] for each in runs})
    stops = [f"- `{each.name}`: {each.log.stop}" for each in runs if each.log.stop]
    caption = (
        "\n\nMeans over seeds, ± the standard error of the mean difference. "
        f"Margin: {margin} nats. Device: {', '.join(machines)}."
    )
    return "\n".join(lines) + caption + ("\n\nStopped:\n\n" + "\n".join(stops) if stops else "")


def outcome() -> str:
    """The results of the runs for the plan's questions, as Markdown paragraphs."""
    runs, plan = logs(), Plan.read(PLAN)
    margin, found = plan.margin, group_runs(runs)
    apart = [(s, g, d) for s in found for g in s.groups if (d := difference(s, g))]
    where, who = falls_behind(found)
    gap = difference(where, who)
    others = [each for each in apart if each[1] is not who]
    ruled = Counter(d.verdict(margin) for *_, d in others)
    errors = [d.error for *_, d in others if d.error is not None]
    closed = difference(where, _group(where, "factored"))
    normed = next(s for s in found if s.fields == {**where.fields, "qk_norm": True})
    with_norm = difference(normed, _group(normed, who.attention))
    assert gap is not None and closed is not None and with_norm is not None
    stops = sum(bool(each.log.stop) for each in runs)
    plain = sum(not each.run.qk_norm for each in runs)
    usual = [g for s in found for g in s.groups if g is not who]
    early, late = (_deviations(who, at) for at in (0, -1))
    most = math.ceil(100 * max(max(_deviations(g, -1)) for g in usual)) / 100
    worst = max(x for *_, x in layer_errors(who, MEASURED[0], "dq_rel_l2"))
    exact = _group(where, "sdpa")
    exact_worst = max(x for *_, x in layer_errors(exact, MEASURED[0], "dq_rel_l2"))
    bias = gradient_numbers(who, MEASURED[0])
    own, usually = gradient_numbers(who, ""), gradient_numbers(exact, MEASURED[0])
    measured = who.runs[0].series["layer", "", 0, "sigma_q"]
    first_at = measured[0][0] / who.runs[0].run.steps

    larger = {scale.tokens: scale.large for scale in plan.scales.values()}
    at_large = [
        g
        for s in found
        if s.fields["qk_norm"] and s.fields["tokens_per_step"] == larger[s.fields["tokens"]]
        for g in s.groups
    ]
    large = sorted({g.runs[0].run.tokens_per_step for g in at_large})
    noise = [gradient_numbers(g, "")["noise_scale"] * g.runs[0].run.context for g in at_large]
    steep, exactly = (_range([_visible(g, name) for g in at_large]) for name in MEASURED)
    ratios = {
        tensor: geometric_mean(
            [
                _error(g, MEASURED[0], tensor) / _error(g, MEASURED[1], tensor)
                for s in found
                for g in s.groups
                if g.attention == "sdpa"
            ]
        )
        for tensor in ("dq", "dk", "dv")
    }
    share = json.loads((LOGS.parent / "attribution.json").read_text())["share"]
    steps = who.runs[0].run.steps
    gaps = difference_curve(who, exact)
    halfway = next(y for x, _, y, _ in gaps if x >= who.runs[0].run.tokens / 2)
    plain_settings = (s for s in found if not s.fields["qk_norm"])
    short = min(plain_settings, key=lambda s: s.fields["tokens_per_step"])
    shorter = difference(short, _group(short, who.attention))
    assert shorter is not None
    paragraphs = (
        f"""**SageBwd has a higher loss than 16-bit attention in one setting without QK-norm;
        `FACTORED` does not.** After {steps:,} steps of {where.fields["tokens_per_step"]:,} tokens,
        SageBwd's held-out loss minus that of 16-bit attention is {with_error(gap)} nats. In the
        same setting the difference is {with_error(closed)} for `FACTORED`. With QK-norm it is
        {with_error(with_norm)} for SageBwd. There are {len(apart)} such differences. SageBwd's is
        the only one that is larger than twice its error and has the same sign for all seeds.""",
        f"""**The error seems to amplify itself.** Take the standard deviation of Q in the layer
        where it is largest. In these runs of SageBwd it grows from {_between(early)} at the first
        measurement, after {first_at:.0%} of the steps, to {_between(late)} at the last. In the
        other {len(runs) - len(who.runs)} runs it ends at {most:.2f} or less. Larger logits have
        coarser INT8 codes. At the end, the relative error of SageBwd's dQ is up to {worst:.0%} in a
        layer; in the layers of the models trained in 16 bit it is up to {exact_worst:.0%}. Let G be
        the mean gradient and b the mean error that SageBwd adds to it. Here |b|² is
        {bias["bias_square"]:.2f} ± {bias["bias_square_error"]:.2f} and |G|² is
        {own["square"]:.2f} ± {own["square_error"]:.2f}; along G, b removes
        {-bias["bias_along"]:.0%} of it. In the models trained in 16 bit, |b|² is
        {usually["bias_square"]:.3f} ± {usually["bias_square_error"]:.3f}, |G|² is
        {gradient_numbers(exact, "")["square"]:.2f}, and b removes {-usually["bias_along"]:.0%}.
        After half of the tokens the difference in loss is {halfway:.3f} nats. The number of steps
        alone does not cause it: after {short.groups[0].runs[0].run.steps:,} steps with a quarter of
        the tokens, the difference is {with_error(shorter)} nats.""",
        f"""**No other difference is larger than chance.** The largest of the other
        {len(others)} mean differences is
        {with_error(max((d for *_, d in others), key=lambda d: abs(d.mean)))} nats. By the plan's
        rule (a mean above {margin} nats, and the same sign for all seeds), {ruled["better"]} of
        them are better than 16 bit and {ruled["worse"]} worse. But the mean of two seeds has a
        standard error of {min(errors):.3f} to {max(errors):.3f} nats, so the rule cannot separate
        these differences from chance. Smoothing, PV or QK in 16 bit, and stochastic rounding make
        no difference beyond chance either.""",
        f"""**Runs with a number that was not finite: {stops} of {len(runs)}.** {plain} of the
        models have no QK-norm.""",
        f"""**The paper's gap at many tokens per step, with QK-norm, does not appear here, and is
        not expected to.** In the models with QK-norm and the large regimes, SageBwd's b exceeds the
        noise of a step's gradient above {steep} tokens per step, and `FACTORED`'s above {exactly}.
        The noise scale is {_range(noise)} tokens ([theory](theory/noise.md)). The large regimes
        here are {" and ".join(tokens(float(x)) for x in large)} tokens per step, and runs with
        equal tokens have few such steps. The paper reports a gap of 0.054 nats at 2.1M tokens per
        step, which is near SageBwd's threshold and far below `FACTORED`'s. From this measurement
        we expect that `FACTORED` closes the paper's gap. No run has tested it.""",
        f"""**Errors in the trained models.** In the layers of the models trained in 16 bit, the
        errors of SageBwd's dQ, dK and dV are {ratios["dq"]:.1f}, {ratios["dk"]:.1f} and
        {ratios["dv"]:.1f} times those of `FACTORED`.""",
        f"""**The source of the error of dS.** The shipped capture is of a model that was trained
        with SageBwd, without QK-norm. There, {share["pv"]["ds"]:.0%} of the squared error of dS
        comes from PV in the forward, through delta, and {share["qk+qk_recompute"]["ds"]:.0%} from
        QK ([layer by layer](paper.md)). Of the squared error of dQ and dK,
        {share["dq"]["dq"]:.0%} and {share["dk"]["dk"]:.0%} come from the rounding in these two
        products themselves. The table below has runs with PV, and with QK, in 16 bit.""",
    )
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def falls_behind(found: Sequence[Setting]) -> tuple[Setting, Group]:
    """The only setting and attention with a loss that differs from 16 bit by more than chance."""
    sure = [(s, g) for s in found for g in s.groups if (d := difference(s, g)) and not d.is_chance]
    assert len(sure) == 1, [f"{s.title}, {g.attention}" for s, g in sure]
    return sure[0]


def draw_feedback() -> None:
    """Draw the setting of `falls_behind`: differences in loss, and the standard deviation of Q.

    The deviation is that of the layer where it is largest. A line is the mean over seeds; a band
    reaches from the smallest to the largest seed.
    """
    where, _ = falls_behind(group_runs(logs()))
    reference = _group(where, "sdpa")
    figure, (left, right) = plt.subplots(1, 2, layout="constrained")
    figure.suptitle(where.title, fontsize=10.5)
    for group, color in zip(where.groups, plots.COLORS, strict=False):
        if group is reference:
            left.axhline(0, color=color, label=group.attention)
        else:
            _band(left, difference_curve(group, reference), color, group.attention)
        run = group.runs[0]
        measured = [step for step, _ in run.series["layer", "", 0, "sigma_q"]]
        points: list[Point] = []
        for at, step in enumerate(measured):
            each = _deviations(group, at)
            points.append((step * run.run.tokens_per_step, min(each), mean(each), max(each)))
        _band(right, points, color, group.attention)
    left.set_title("Held-out loss minus that of 16 bit, nats")
    right.set_title("Standard deviation of Q, largest layer")
    for axes in (left, right):
        axes.set_xlabel("million tokens")
    left.legend()


def _band(axes: Axes, points: Sequence[Point], color: str, label: str) -> None:
    x, low, middle, high = zip(*points, strict=True)
    x = [each / 1e6 for each in x]
    axes.plot(x, middle, color=color, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _group(setting: Setting, attention: str) -> Group:
    return next(group for group in setting.groups if group.attention == attention)


def _between(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _deviations(group: Group, at: int) -> list[float]:
    """The largest standard deviation of Q over layers, for each run, at measurement `at`."""
    return [
        max(
            values[at][1]
            for (kind, _, _, name), values in each.series.items()
            if (kind, name) == ("layer", "sigma_q")
        )
        for each in group.runs
    ]


def _visible(group: Group, name: str) -> float:
    """The number of tokens per step above which the gradient's bias exceeds its noise."""
    return gradient_numbers(group, name)["visible"] * group.runs[0].run.context


def _error(group: Group, name: str, tensor: str) -> float:
    found = pooled_error(group, name, tensor)
    assert found is not None, f"{group.attention} measured no {tensor} of {name}"
    return found[1]


def _range(values: Sequence[float]) -> str:
    return f"{tokens(min(values))} to {tokens(max(values))}"


def report() -> str:
    """Write the report of all runs into the site, and return the HTML that embeds it."""
    runs = logs()
    page = render(
        runs, margin=Plan.read(PLAN).margin, command="sagesim report docs/data/pretraining"
    )
    write_text(Path(os.environ["SITE"], "report-pretraining.html"), page)
    return (
        '<p><a class="report-link" href="report-pretraining.html">Open the report as a page of its '
        'own</a></p><iframe class="report" src="report-pretraining.html" '
        'title="sagesim report" loading="lazy"></iframe>'
    )
