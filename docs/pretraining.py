"""What pretraining runs have been committed, for the page about them.

A run's log is docs/data/pretraining/NAME.parquet, as `sagesim pretrain` wrote it.
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

from sagesim.experiments.pretrain.compare import (
    Group,
    Point,
    Setting,
    Trained,
    difference,
    difference_curve,
    gradient,
    layer_errors,
    pooled_error,
    settings,
)
from sagesim.experiments.pretrain.page import render
from sagesim.experiments.pretrain.plan import Plan
from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.tables import tokens, with_error
from sagesim.metrics import geometric_mean, mean

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "docs" / "data" / "pretraining"
PLAN = ROOT / "experiments" / "pretrain.toml"
MEASURED = ("kernels:sagebwd", "kernels:factored")
"""What every run measured on the way."""


@cache
def logs() -> list[Trained]:
    """Every committed run, by name."""
    return [Trained(path.stem, Log.read(path)) for path in sorted(LOGS.glob("*.parquet"))]


def finals() -> str:
    """Held-out losses in the end, as Markdown."""
    runs = logs()
    margin = Plan.read(PLAN).margin
    lines = [
        "| setting | attention | seeds | loss | from sdpa | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for setting in settings(runs):
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
    told = (
        f"\n\nMeans over seeds, ± the error of the mean; margin {margin} nats; "
        f"on {', '.join(machines)}."
    )
    return "\n".join(lines) + told + ("\n\nStopped:\n\n" + "\n".join(stops) if stops else "")


def outcome() -> str:
    """What the runs say to the plan's questions, as Markdown."""
    runs, plan = logs(), Plan.read(PLAN)
    margin, found = plan.margin, settings(runs)
    apart = [(s, g, d) for s in found for g in s.groups if (d := difference(s, g))]
    where, who = falls_behind(found)
    gap = difference(where, who)
    others = [each for each in apart if each[1] is not who]
    ruled = Counter(d.verdict(margin) for *_, d in others)
    errors = [d.error for *_, d in others if d.error is not None]
    closed = difference(where, _group(where, "factored"))
    normed = next(s for s in found if s.fields == where.fields | {"qk_norm": True})
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
    bias = gradient(who, MEASURED[0])
    own, usually = gradient(who, ""), gradient(exact, MEASURED[0])
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
    noise = [gradient(g, "")["noise_scale"] * g.runs[0].run.context for g in at_large]
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
    paragraphs = (
        f"""**In one setting without QK-norm SageBwd falls behind, and `FACTORED` does not.** After
        {steps:,} steps of {where.fields["tokens_per_step"]:,} tokens SageBwd's held-out loss is
        {with_error(gap)} nats from that of 16-bit attention. In the same setting `FACTORED` ends
        {with_error(closed)} from it, and SageBwd with QK-norm {with_error(with_norm)}. Of all
        {len(apart)} differences SageBwd's is the only one that is larger than twice its error with
        one sign for all seeds.""",
        f"""**It seems to feed itself.** In these runs of SageBwd the deviation of Q, in the layer
        where it is largest, goes from {_between(early)} at the first measurement, after
        {first_at:.0%} of the steps, to {_between(late)} at the last; in no other of the
        {len(runs)} runs does it end above {most:.2f}. Larger logits are coarser codes: its dQ ends
        up to {worst:.0%} off in a layer, where it would be {exact_worst:.0%} off in the layers of
        the models trained in 16 bit. What it adds to the mean gradient has a square of
        {bias["bias_square"]:.2f} ± {bias["bias_square_error"]:.2f}, where the gradient's own is
        {own["square"]:.2f} ± {own["square_error"]:.2f}, and takes {-bias["bias_along"]:.0%} off it;
        in the models trained in 16 bit these are {usually["bias_square"]:.3f} ±
        {usually["bias_square_error"]:.3f}, {gradient(exact, "")["square"]:.2f} and
        {-usually["bias_along"]:.0%}. The gap is {halfway:.3f} nats at half of the tokens. So many
        steps alone do not do it: {short.groups[0].runs[0].run.steps:,} steps of a quarter of the
        tokens end {with_error(shorter)} nats from 16 bit.""",
        f"""**No other attention differs from 16 bit by more than chance.** The largest of the other
        {len(others)} mean differences is
        {with_error(max((d for *_, d in others), key=lambda d: abs(d.mean)))} nats. The plan's rule,
        a mean beyond {margin} nats and one sign, calls {ruled["better"]} of them better than 16 bit
        and {ruled["worse"]} worse: the mean of two seeds has an error of {min(errors):.3f} to
        {max(errors):.3f} nats, and with that the rule cannot tell. Nor is there a difference beyond
        chance from smoothing, from the site that is in 16 bit, or from stochastic rounding.""",
        f"""**Nothing stopped**: {stops} of {len(runs)} runs met a number that was not finite.
        {plain} of the models have no QK-norm.""",
        f"""**The paper's gap at many tokens per step, with QK-norm, is not seen here, nor
        expected.** What SageBwd adds to the mean gradient of models with QK-norm in the large
        regimes exceeds the noise of a step from {steep} tokens per step on, and what `FACTORED`
        adds from {exactly} on, at a noise scale of {_range(noise)} ([theory](theory/noise.md)). The
        large regimes here are {" and ".join(tokens(float(x)) for x in large)} tokens, and
        runs at equal tokens make few steps of them. The paper's large one, 2.1M, where it saw a
        gap of 0.054 nats, is next to SageBwd's threshold and far below `FACTORED`'s. So we expect
        `FACTORED` to close that gap: by this measurement, and not yet by a loss.""",
        f"""**In the trained models** SageBwd's dQ, dK and dV are {ratios["dq"]:.1f},
        {ratios["dk"]:.1f} and {ratios["dv"]:.1f} times as far off as `FACTORED`'s, measured in
        every layer of those that were trained in 16 bit.""",
        f"""**What carries the error of dS.** In the shipped capture, of a model that was trained
        with SageBwd without QK-norm, {share["pv"]["ds"]:.0%} of it comes from the forward's PV
        through delta and {share["qk+qk_recompute"]["ds"]:.0%} from QK
        ([layer by layer](paper.md)). Of the error of dQ and dK, {share["dq"]["dq"]:.0%} and
        {share["dk"]["dk"]:.0%} is made by the rounding in these two products themselves. Runs
        with PV, or with QK, in 16 bit are in the table below.""",
    )
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def falls_behind(found: Sequence[Setting]) -> tuple[Setting, Group]:
    """The one setting and attention whose loss differs from that of 16 bit by more than chance."""
    sure = [(s, g) for s in found for g in s.groups if (d := difference(s, g)) and not d.is_chance]
    assert len(sure) == 1, [f"{s.title}, {g.attention}" for s, g in sure]
    return sure[0]


def draw_feedback() -> None:
    """In that setting: losses less that of 16 bit, and the deviation of Q in the layer where it is
    largest; a line is the mean over seeds, a band goes from the smallest to the largest."""
    where, _ = falls_behind(settings(logs()))
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
    left.set_title("Held-out loss less that of 16 bit, nats")
    right.set_title("Deviation of Q, largest of a layer")
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
    """Of Q, in the layer where it is largest, of each run; `at` counts measurements."""
    return [
        max(
            values[at][1]
            for (kind, _, _, name), values in each.series.items()
            if (kind, name) == ("layer", "sigma_q")
        )
        for each in group.runs
    ]


def _visible(group: Group, name: str) -> float:
    """Tokens per step from which on the bias of a gradient exceeds its noise."""
    return gradient(group, name)["visible"] * group.runs[0].run.context


def _error(group: Group, name: str, tensor: str) -> float:
    found = pooled_error(group, name, tensor)
    assert found is not None, f"{group.attention} measured no {tensor} of {name}"
    return found[1]


def _range(values: Sequence[float]) -> str:
    return f"{tokens(min(values))} to {tokens(max(values))}"


def report() -> str:
    """Write the report of all runs into the site; returns the HTML that shows it."""
    runs = logs()
    page = render(
        runs, margin=Plan.read(PLAN).margin, command="sagesim report docs/data/pretraining"
    )
    Path(os.environ["SITE"], "report-pretraining.html").write_text(page, encoding="utf-8")
    return (
        '<p><a class="report-link" href="report-pretraining.html">Open the report on a page of its '
        'own</a></p><iframe class="report" src="report-pretraining.html" '
        'title="sagesim report" loading="lazy"></iframe>'
    )
