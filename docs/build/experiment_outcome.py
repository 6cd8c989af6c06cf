"""What experiment A says about its predictions, for docs/pretraining_experiment.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

import matplotlib.pyplot as plt
import plots
from experiment import (
    DATA,
    PLANS,
    REFERENCE,
    SCHEME,
    TWIN,
    A,
    Records,
    losses,
    planned,
    recorded,
    signed,
    verdicts,
)
from grid import markdown
from scipy.stats import t

from sagesim.experiments.pretrain.plan.plan import Plan
from sagesim.experiments.pretrain.report.rules import CLOSED, REAL, Gap, Verdict
from sagesim.experiments.pretrain.run.log import Log

DELTA: Final = f"{SCHEME} delta=p"
SCALES: Final = (
    f"{SCHEME} dv=int8@tile_column,block dq=int8@tile_row,block dk=int8@tile_column,block"
)
"""The arms that change one thing of the scheme."""
DEFAULT: Final = "kernels:factored_qk"
CLOSES, REAL_GAP = Verdict.CLOSES, Verdict.REAL

ANSWERS: Final = {
    DELTA: {
        Verdict.REAL: "Delta from P alone does not close it.",
        Verdict.CLOSES: "Delta from P alone closes it.",
        Verdict.UNDECIDED: "Whether delta from P alone closes it is undecided.",
    },
    SCALES: {
        Verdict.REAL: "Finer scales of P and dS alone do not close it.",
        Verdict.CLOSES: "Finer scales of P and dS alone close it.",
        Verdict.UNDECIDED: "Whether finer scales of P and dS alone close it is undecided.",
    },
}

MEASURED: Final = {
    ("layer", "", "sigma_q"): "standard deviation of Q",
    ("layer", SCHEME, "dq_rel_l2"): "error of dQ",
    ("layer", SCHEME, "ds_rel_l2"): "error of dS",
    ("gradient", SCHEME, "bias_square"): "square of b",
    ("gradient", "", "square"): "square of G",
}
"""Numbers in a log by group, attention and name, and how a table calls them."""


def all_gaps(folder: Path = DATA / A) -> dict[str, Gap]:
    """The gaps of the arms; none if runs are missing or the rules decide nothing."""
    every = planned("arms")
    made = recorded(every, folder)
    names = list(dict.fromkeys(each.run.attention for each in every))
    seeds = sorted({each.run.seed for each in every})
    return verdicts(made, names, seeds) if len(made) == len(every) else {}


def in_one_line() -> str:
    """The result of experiment A in four rows."""
    gaps = all_gaps()
    if not gaps:
        return "The runs are not complete."
    one = planned("arms")[0].run
    seeds = len({each.run.seed for each in planned("arms")})
    words = {
        SCHEME: "the paper's scheme",
        SCALES: "... with finer scales of P and dS",
        DELTA: "... with delta from P",
        DEFAULT: "the default spec",
    }
    rows = [
        [title, signed(gaps[arm].differences["own"]), str(gaps[arm].verdict)]
        for arm, title in words.items()
    ]
    head = ["attention", "held-out loss minus that of 16 bit, nats", "verdict"]
    return (
        markdown(head, rows)
        + f"\n\nA model of {one.size.upper()} parameters without QK-norm, {seeds} seeds each, one "
        "corpus, one learning rate. Two implementations in 16 bit differ by "
        f"{gaps[SCHEME].deviations['own']:.4f} nats (root mean square over seeds)."
    )


def outcome(folder: Path = DATA / A) -> str:
    """What the verdicts say about the two predictions."""
    gaps = all_gaps(folder)
    if not gaps:
        return "The predictions are open."
    every = planned("arms")
    made = recorded(every, folder)
    seeds = sorted({each.run.seed for each in every})
    gap, unit = gaps[SCHEME], max(gaps[SCHEME].deviations.values())
    if gap.verdict is not Verdict.REAL:
        return f"`{SCHEME}` has no real gap, so the predictions are not tested."
    said = [
        "**The gap of SageBwd is real in this setting.** "
        f"{_d(gap)} A real gap is above {REAL * unit:.3f}."
    ]
    said += [f"**{ANSWERS[arm][gaps[arm].verdict]}** {_d(gaps[arm])}" for arm in ANSWERS]
    said[-1] += {
        (CLOSES, REAL_GAP): " So the first prediction holds in this setting, and the second fails.",
        (REAL_GAP, CLOSES): " So the second prediction holds in this setting, and the first fails.",
        (
            CLOSES,
            CLOSES,
        ): " So each prediction is right about one change and wrong about the other.",
        (REAL_GAP, REAL_GAP): " So both predictions fail in this setting.",
    }.get((gaps[DELTA].verdict, gaps[SCALES].verdict), " So the predictions are undecided.")
    said.append(_strength(made, seeds, gaps))
    closed = [
        name for name, x in gaps.items() if x.verdict is Verdict.CLOSES and name not in ANSWERS
    ]
    if closed:
        exact = losses(made, REFERENCE, seeds)
        twin = fmean(x - y for x, y in zip(losses(made, TWIN, seeds), exact, strict=True))
        positive = sum(each.differences.get("own", 0.0) > 0 for each in gaps.values())
        named = ", ".join(f"`{name}`" for name in closed)
        said.append(
            f"**By the rule, these arms close it too:** {named}. "
            f"A smaller gap of theirs is not excluded. A gap counts as closed up to "
            f"{CLOSED * unit:.3f} nats, and d is above 0 for {positive} of {len(gaps)} arms. All "
            f"arms are compared with the same {len(seeds)} runs of `{REFERENCE}`; d of the twin is "
            f"{signed(twin)}."
        )
    return "\n\n".join(said)


def _strength(made: Records, seeds: Sequence[int], gaps: Mapping[str, Gap]) -> str:
    """How sure the verdicts are if the spread of the arms themselves is counted."""
    exact = losses(made, REFERENCE, seeds)
    apart = {
        arm: [x - y for x, y in zip(losses(made, arm, seeds), exact, strict=True)]
        for arm in (SCHEME, DELTA, SCALES)
        if gaps[arm].differences
    }
    said = [
        "**How sure is this?** The rules compare with the twin's spread alone, and the arms with a "
        "gap spread more."
    ]
    if SCHEME in apart:
        scheme = apart[SCHEME]
        said.append(
            f"The differences of SageBwd are {min(scheme):.3f} to {max(scheme):.3f} nats. By "
            f"Student's t on its own {len(seeds)} differences, the probability of such a mean is "
            f"{_probability(scheme):.3f} if there is no gap (two-sided)."
        )
        for arm, name in ((SCALES, "with finer scales"), (DELTA, "with delta from P")):
            if arm in apart:
                pairs = [x - y for x, y in zip(scheme, apart[arm], strict=True)]
                said.append(
                    f"SageBwd and SageBwd {name}, in pairs of equal seeds: "
                    f"{signed(fmean(pairs))} nats, probability {_probability(pairs):.2f}."
                )
        first = Plan.read(PLANS / "five_questions.toml").seeds
        new = [x for seed, x in zip(seeds, scheme, strict=True) if seed not in first]
        if new and len(new) < len(seeds):
            said.append(
                f"Seeds {' and '.join(map(str, first))} are those of the first runs, in which the "
                f"gap was found. The mean of the other seeds alone is {signed(fmean(new))} nats."
            )
    return " ".join(said)


def _probability(differences: Sequence[float]) -> float:
    """The two-sided p-value of a mean of 0, by Student's t. NaN if all are equal."""
    count = len(differences)
    error = stdev(differences) / count**0.5
    return float(2 * t.sf(abs(fmean(differences)) / error, count - 1)) if error else math.nan


def _d(gap: Gap) -> str:
    values = list(map(signed, gap.differences.values()))
    return f"d is {' and '.join(values)} nats." if values else "A run stopped."


def models(folder: Path = DATA / A) -> str:
    """What was measured in the models of each arm after the last step, over the seeds."""
    logs: dict[str, list[Log]] = {}
    for each in planned("arms"):
        path = folder / f"{each.folder}.parquet"
        if path.exists():
            logs.setdefault(each.run.attention, []).append(Log.read(path))
    if not logs:
        return "**No run has been made.**"
    rows = [
        [f"`{name}`", *(_spread(column) for column in zip(*map(_last, found), strict=True))]
        for name, every in logs.items()
        if (found := [log for log in every if not log.stop])
    ]
    return (
        markdown(["trained with", *MEASURED.values()], rows)
        + "\n\nFrom the smallest to the largest of the seeds, after the last step. Standard "
        "deviations and errors are those of the layer where they are largest. The errors are those "
        f"of `{SCHEME}` in a layer of the model, relative L2 against float64; all other layers "
        "compute 16-bit attention. G is the mean gradient on 256 held-out sequences, and b is the "
        f"mean error that `{SCHEME}` adds to it."
    )


def _last(log: Log) -> list[float]:
    """Each number of `MEASURED` after the last step; over layers, the largest."""
    found: dict[tuple[str, str, str], float] = {}
    for row in log.rows:
        if row.step == log.run.steps:
            key = row.group, row.attention, row.name
            found[key] = max(row.value, found.get(key, -math.inf))
    return [found[key] for key in MEASURED]


def _spread(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def draw(folder: Path = DATA / A) -> None:
    """Draw the difference of every arm and seed to sdpa, by the arm's own attention."""
    every = planned("arms")
    made = recorded(every, folder)
    seeds = sorted({each.run.seed for each in every})
    names = [
        name
        for name in dict.fromkeys(each.run.attention for each in every)
        if all((name, seed) in made and not made[name, seed]["stop"] for seed in seeds)
    ]
    exact = losses(made, REFERENCE, seeds)
    apart: Mapping[str, list[float]] = {
        name: [x - y for x, y in zip(losses(made, name, seeds), exact, strict=True)]
        for name in names
        if name != REFERENCE
    }
    unit = fmean(x**2 for x in apart[TWIN]) ** 0.5
    _, axes = plt.subplots(figsize=plots.WIDE, layout="constrained")
    axes.axvspan(-1, CLOSED * unit, color="0.94", label=rf"d of a closed gap: up to {CLOSED:g} $s$")
    axes.axvline(
        REAL * unit, color=plots.GREY, linestyle="--", label=rf"d of a real gap: above {REAL:g} $s$"
    )
    for row, values in enumerate(apart.values()):
        label = ("a seed", "d, the mean of the seeds") if row == 0 else (None, None)
        axes.plot(values, [row] * len(values), "o", color=plots.BLUE, alpha=0.7, label=label[0])
        axes.plot(fmean(values), row, "|", color=plots.ORANGE, ms=16, mew=2.5, label=label[1])
    titles = {TWIN: "fpa_bf16, the twin", SCALES: "sagebwd, finer scales of P and dS"}
    axes.set_yticks(
        range(len(apart)), [titles.get(name, name.removeprefix("kernels:")) for name in apart]
    )
    axes.set_xlim(left=min(map(min, apart.values())) - 0.5 * unit)
    axes.invert_yaxis()
    axes.set_title("Held-out loss minus that of sdpa")
    axes.set_xlabel("nats")
    axes.legend(loc="lower right")
