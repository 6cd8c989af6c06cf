"""Tables, text and figures about the committed pretraining runs, for docs/pretraining.md.

docs/data/pretraining/NAME.parquet is the log of a run, as `sagesim pretrain` wrote it.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import measured_sequences
import plots
from experiment_outcome import all_gaps
from grid import markdown
from matplotlib.axes import Axes
from scipy.stats import t

from sagesim.analysis import TITLES, geometric_mean, mean
from sagesim.experiments.paper_table_2 import PAPER_TABLE_2
from sagesim.experiments.pretrain.plan.plan import Plan, Regime
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
from theory.noise import RELIABLE_SAMPLES, USEFUL_RATIO, gradient_to_error

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
    stops = sum(bool(each.stop) for each in runs)
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

    larger = {x["large"].tokens: x["large"].tokens_per_step for x in plan.scales.values()}
    at_large = [
        g
        for s in found
        if s.fields["qk_norm"] and s.fields["tokens_per_step"] == larger[s.fields["tokens"]]
        for g in s.groups
    ]
    large = sorted({g.runs[0].run.tokens_per_step for g in at_large})
    verdict = all_gaps()[MEASURED[0]].verdict
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
    freedom, by_chance = gap.degrees, gap.probability
    intervals = [float(t.ppf(0.975, d.degrees)) * d.error for *_, d in others if d.error]
    own_layer = max(layer_errors(who, MEASURED[0], "dq_rel_l2"), key=lambda point: point[2])[0]
    of_ds = next(p[2] for p in layer_errors(who, MEASURED[0], "ds_rel_l2") if p[0] == own_layer)
    of_dq = next(p[2] for p in layer_errors(who, MEASURED[0], "dq_rel_l2") if p[0] == own_layer)
    ratio, usual_ratio = (
        gradient_to_error(g["square"], b["bias_square"])
        for g, b in ((own, bias), (gradient_numbers(exact, ""), usually))
    )
    biases = [
        (square, error)
        for each in runs
        for name in MEASURED
        for (_, square), (_, error) in zip(
            each.series["gradient", name, -1, "bias_square"],
            each.series["gradient", name, -1, "bias_square_error"],
            strict=True,
        )
    ]
    seen = max(x for g in at_large for *_, x in layer_errors(g, MEASURED[0], "dq_rel_l2"))
    last = [gradient_numbers(g, name) for g in at_large for name in MEASURED]
    typical = median(n["bias_square_error"] / abs(n["bias_square"]) for n in last)
    clamped = sum(error == 0 for _, error in biases)
    sequences = runs[0].run.monitor_sequences
    doubt = f"Fewer than {RELIABLE_SAMPLES} sequences make the errors of |b|² and |G|² unreliable."
    assert sequences < RELIABLE_SAMPLES
    paragraphs = (
        f"""**One difference stands out, in a setting where the paper has none.** After {steps:,}
        steps of {where.fields["tokens_per_step"]:,} tokens without QK-norm, SageBwd's held-out loss
        minus that of 16-bit attention is {with_error(gap)} nats. In the same setting the difference
        is {with_error(closed)} for `FACTORED`. With QK-norm it is {with_error(with_norm)} for
        SageBwd. This is the *small* regime of its scale. The paper's small regime has parity, with
        and without QK-norm; its gap is in the large regime. The error has {freedom} degrees of
        freedom, and all differences of a setting share the same runs in 16 bit. By Student's t, a
        difference this large has the probability {by_chance:.3f} if there is none. There are
        {len(apart)} differences; that one of them is this large has a probability of up to
        {min(1.0, len(apart) * by_chance):.2f}. So these runs suggest a gap and do not prove it.
        [Experiment A](pretraining_experiment.md) repeats this cell with four seeds and with rules
        written in advance; the rules' verdict about SageBwd is: {verdict}.""",
        f"""**In this setting the error grows during training.** With SageBwd, the
        largest standard deviation of Q over the layers is {_between(early)} after {first_at:.0%} of
        the steps. At the end it is {_between(late)}.
        In the other {len(runs) - len(who.runs)} runs it ends at {most:.2f} or less. At the end, the
        relative error of SageBwd's dQ is up to {worst:.0%} in a layer; in the layers of the models
        trained in 16 bit it is up to {exact_worst:.0%}. In the layer with the largest error of dQ,
        it is {of_dq:.3f} and that of dS {of_ds:.3f}: most of it arises in the product dQ = dS K,
        and not in the logits. Let G be the mean gradient and b the mean error that SageBwd adds to
        it. Here |b|² is {bias["bias_square"]:.2f} ± {bias["bias_square_error"]:.2f} and |G|² is
        {own["square"]:.2f} ± {own["square_error"]:.2f}; along G, b removes
        {-bias["bias_along"]:.0%} of it. |G| is {ratio:.1f} times |b|, where arXiv 2505.19115 has a
        threshold of {USEFUL_RATIO:.2f} ([two thresholds](theory/noise.md)). In the models trained
        in 16 bit, |b|² is {usually["bias_square"]:.3f} ± {usually["bias_square_error"]:.3f}, |G|²
        is {gradient_numbers(exact, "")["square"]:.2f}, b removes {-usually["bias_along"]:.0%}, and
        |G| is {usual_ratio:.0f} times |b|. After half of the tokens the difference in loss is
        {halfway:.3f} nats. With {short.groups[0].runs[0].run.steps:,} steps of a quarter of the
        tokens each, the difference is {with_error(shorter)} nats. Whether the error causes the
        difference, or both follow from something else, these runs do not show.""",
        f"""**The other {len(others)} differences show nothing, in either direction.** The largest
        is {with_error(max((d for *_, d in others), key=lambda d: abs(d.mean)))} nats. By the plan's
        rule (a mean above {margin} nats, and the same sign for all seeds), {ruled["better"]} of
        them are better than 16 bit and {ruled["worse"]} worse. But the mean of two seeds has a
        standard error of {min(errors):.3f} to {max(errors):.3f} nats, so the rule cannot separate
        these differences from chance. Their 95 % intervals reach {min(intervals):.3f} to
        {max(intervals):.3f} nats to both sides; the paper's gap is 0.054. These runs can therefore
        not confirm or refute that smoothing K is essential, that QK-norm is necessary, or that
        smoothing Q, PV or QK in 16 bit, and stochastic rounding change nothing.""",
        f"""**Runs with a number that was not finite: {stops} of {len(runs)}.** {plain} of the
        models have no QK-norm.""",
        f"""**The paper's gap at many tokens per step, with QK-norm, was not tested.** The large
        regimes here are {" and ".join(tokens(float(x)) for x in large)} tokens per step, and runs
        with equal tokens have few such steps. In the models with QK-norm and the large regimes,
        SageBwd's b exceeds the noise of a step's gradient above {steep} tokens per step, and
        `FACTORED`'s above {exactly}. The noise scale is {_range(noise)} tokens
        ([theory](theory/noise.md)). The paper's gap is 0.054 nats at 2.1M tokens per step. Nothing
        follows from this for the paper's gap. The estimates of |b|² are from {sequences} sequences;
        their standard error is {typical:.0%} of |b|² in the median of these models, and was
        computed as exactly 0 in {clamped} of {len(biases)} cases of all runs. {doubt} Above the
        threshold a larger batch can at most halve the squared error, and an optimiser averages over
        steps as well. And b was measured where the error of SageBwd's dQ is at most {seen:.2f}; in
        the paper's model it is {PAPER_TABLE_2["dq"][1]:.2f} ([Table 2](paper.md)).""",
        measured_sequences.paragraph(exact),
        """**What no run on this page can show.** No run has the default spec, `factored_qk`.
        Held-out losses are those of each run's own attention; no checkpoint was evaluated in 16 bit
        as well. There is no second 16-bit implementation among the runs, which would show how far
        two implementations without INT8 differ. No run changes delta or the scales alone.
        [Experiment A](pretraining_experiment.md) has such runs, in one setting.""",
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


PAPER = {
    "parameters": "325M",
    "tokens of a run": "78B",
    "text": "OpenWebText",
    "vocabulary": "50,257 (GPT-2's)",
    "context": "4,096",
    "tokens per step, large": "2.1M (512 sequences)",
    "tokens per step, small": "260K (64 sequences)",
    "steps, large": "37,500",
    "steps, small": "300,000",
    "warmup, large": "1,000 steps",
    "warmup, small": "7,500 steps",
    "learning rate": "3e-5, cosine",
    "last learning rate, of the largest": "not stated",
    "AdamW: betas, weight decay, clipping": "not stated",
    "head shares the embedding's weights": "not stated",
    "precision": "BF16 mixed",
    "seeds": "not stated",
}
"""The settings of arXiv 2603.02170."""


def settings() -> str:
    """The settings of our runs beside the paper's."""
    plan, runs = Plan.read(PLAN), [each.run for each in logs()]
    one = runs[0]
    made = {run.tokens for run in runs}

    def each(name: str, of: Callable[[Regime], int]) -> str:
        regimes = (scale[name] for scale in plan.scales.values())
        return " or ".join(f"{of(regime):,}" for regime in regimes if regime.tokens in made)

    def warmup(regime: Regime) -> int:
        return max(1, round(plan.base["warmup"] * regime.steps))

    ours = {
        "parameters": one.size.upper(),
        "tokens of a run": each("large", lambda x: x.tokens),
        "text": "C sources and documentation of Linux 6.1",
        "vocabulary": f"{one.vocabulary:,}",
        "context": f"{one.context:,}",
        "tokens per step, large": each("large", lambda x: x.tokens_per_step),
        "tokens per step, small": each("small", lambda x: x.tokens_per_step),
        "steps, large": each("large", lambda x: x.steps),
        "steps, small": each("small", lambda x: x.steps),
        "warmup, large": f"{each('large', warmup)} steps",
        "warmup, small": f"{each('small', warmup)} steps",
        "learning rate": f"{one.lr:g}, cosine",
        "last learning rate, of the largest": f"{one.final_lr:g}",
        "AdamW: betas, weight decay, clipping": (
            f"{one.beta1:g} and {one.beta2:g}, {one.weight_decay:g}, {one.clip:g}"
        ),
        "head shares the embedding's weights": "yes" if one.tied else "no",
        "precision": "BF16 mixed" if one.precision == "bf16" else one.precision,
        "seeds": str(len(plan.seeds)),
    }
    return markdown(["setting", "the paper", "here"], [[k, PAPER[k], ours[k]] for k in PAPER])


def table_2() -> str:
    """The paper's Table 2 beside the models that we trained, and Gaussian inputs."""
    found = group_runs(logs())
    behind, who = falls_behind(found)
    large = max(
        (s for s in found if s.fields["qk_norm"]), key=lambda s: s.fields["tokens_per_step"]
    )
    rows = [
        ["the paper: 325M, QK-norm, layer 11", *(f"{x:.4f}" for _, x in PAPER_TABLE_2.values())]
    ]
    for setting, attention in (
        (large, "sdpa"),
        (large, who.attention),
        (behind, "sdpa"),
        (behind, who.attention),
    ):
        group = _group(setting, attention)
        worst = max(layer_errors(group, MEASURED[0], "dq_rel_l2"), key=lambda point: point[2])[0]
        cells = []
        for tensor in PAPER_TABLE_2:
            points = layer_errors(group, MEASURED[0], f"{tensor}_rel_l2")
            cells.append(f"{next(p[2] for p in points if p[0] == worst):.4f}")
        trained = "16 bit" if attention == "sdpa" else "SageBwd"
        rows.append([f"18M, {setting.title}, trained in {trained}, layer {worst:.0f}", *cells])
    data = json.loads((LOGS.parent / "both_metrics.json").read_text())
    for row in data["rows"]:
        if row["label"] == "sagebwd" and row["inputs"].startswith("Gaussian"):
            exact = row["exact"]
            cells = (f"{exact[x]:.4f}" if x in exact else "-" for x in PAPER_TABLE_2)
            rows.append([row["inputs"], *cells])
    return markdown(["inputs", *(TITLES[x] for x in PAPER_TABLE_2)], rows) + (
        "\n\nRelative L2 errors of SageBwd. Of our models, the layer with the largest error of dQ "
        "at the last measurement, means over seeds. All logs are in `docs/data/pretraining`."
    )


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
