"""Tables and the figure of SmolLM2, fine-tuned with several attentions and seeds.

docs/data/smollm2_seeds has a file for each run, as scripts/smollm2_seeds.py writes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import matplotlib.pyplot as plt
import plots
import records
from grid import markdown
from scipy.stats import chi2

from sagesim.experiments.pretrain.report.rules import REAL
from sagesim_kernels.bench.machine import one_line

DATA: Final = Path(__file__).parents[1] / "data" / "smollm2_seeds"
REFERENCE, TWIN = "sdpa", "fpa_bf16"
SCHEMES: Final = ("sagebwd", "factored", "factored_qk")
EVALUATIONS: Final = {"own": "its own", "sdpa": "`sdpa`"}
"""The attention that computes the held-out loss: its name in the records, and in words."""


@dataclass(frozen=True)
class Runs:
    """The runs of all attentions and seeds."""

    documents: dict[tuple[str, int], dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """
        Raises:
            ValueError: if a run is missing, or was made in another setting or on another machine.
        """
        every = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
        found = cls({(each["attention"], each["seed"]): each for each in every})
        for name in (REFERENCE, TWIN, *SCHEMES):
            for seed in found.seeds:
                if (name, seed) not in found.documents:
                    raise ValueError(f"{folder}: no run of {name} with seed {seed}")
        for key in ("setting", "machine", "command"):
            if any(each[key] != every[0][key] for each in every):
                raise ValueError(f"{folder}: the runs differ in {key}")
        return found

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.documents})

    @property
    def one(self) -> dict[str, Any]:
        """A run, for what all have in common."""
        return self.documents[REFERENCE, self.seeds[0]]

    @property
    def steps(self) -> list[int]:
        """The steps after which the runs were evaluated."""
        return [each["step"] for each in self.one["evaluations"]]

    def loss(self, name: str, seed: int, evaluation: str, at: int = -1) -> float:
        """The mean held-out loss; `at` counts evaluations."""
        each = self.documents[name, seed]["evaluations"][at][evaluation]
        return fmean(each)

    def apart(self, name: str, evaluation: str, at: int = -1, of: str = REFERENCE) -> list[float]:
        """By seed, the loss less that of another attention's run under the same evaluation."""
        return [
            self.loss(name, seed, evaluation, at) - self.loss(of, seed, evaluation, at)
            for seed in self.seeds
        ]

    def deviation(self, evaluation: str) -> float:
        """The root mean square of the twin's differences after the last step."""
        return fmean([x**2 for x in self.apart(TWIN, evaluation)]) ** 0.5


def finals(folder: Path = DATA) -> str:
    """The losses after the last step."""
    runs = Runs.read(folder)
    rows: list[list[str]] = []
    for name in (REFERENCE, TWIN, *SCHEMES):
        for evaluation, words in EVALUATIONS.items():
            if (name, evaluation) == (REFERENCE, "own"):
                continue  # it is its own
            losses = [runs.loss(name, seed, evaluation) for seed in runs.seeds]
            cells = [f"{x:.5f}" for x in losses]
            if name != REFERENCE:
                differences = runs.apart(name, evaluation)
                cells = [f"{x} ({_signed(d)})" for x, d in zip(cells, differences, strict=True)]
                cells.append(_signed(fmean(differences)))
            else:
                cells.append("")
            rows.append([f"`{name}`", words, *cells])
    head = ["trained with", "evaluated by", *(f"seed {seed}" for seed in runs.seeds), "mean"]
    setting = runs.one["setting"]
    return (
        f"{markdown(head, rows)}\n\n"
        f"Held-out loss in nats after the last of {setting['steps']} steps of {setting['rows']} "
        f"sequences, over {setting['held_out']} sequences; a sequence has {setting['tokens']} "
        "tokens. In brackets: less the loss of the run of `sdpa` with the same seed. Mean: of "
        f"these differences. {setting['model']}; {setting['text']}; {setting['optimizer']}. Before "
        f"the first step the loss is {runs.loss(REFERENCE, runs.seeds[0], 'sdpa', 0):.5f}.\n\n"
        + records.with_age(
            f"`{runs.one['command']}` on {one_line(runs.one['machine'])}.", runs.one["machine"]
        )
    )


def by_step(folder: Path = DATA) -> str:
    """The difference to sdpa at every evaluation."""
    runs = Runs.read(folder)
    rows = [
        [f"`{name}`", words]
        + [_signed(fmean(runs.apart(name, evaluation, at))) for at in range(len(runs.steps))]
        for name in (TWIN, *SCHEMES)
        for evaluation, words in EVALUATIONS.items()
    ]
    head = ["trained with", "evaluated by", *(f"step {step}" for step in runs.steps)]
    said = f"Held-out loss less that of `sdpa`, mean over {len(runs.seeds)} seeds, in nats."
    return f"{markdown(head, rows)}\n\n{said}"


def findings(folder: Path = DATA) -> str:
    """What the losses show, and what they cannot."""
    runs = Runs.read(folder)
    s = {evaluation: runs.deviation(evaluation) for evaluation in EVALUATIONS}
    d = {
        (name, evaluation): fmean(runs.apart(name, evaluation))
        for name in SCHEMES
        for evaluation in EVALUATIONS
    }

    def means(evaluation: str) -> str:
        return _listed({name: _signed(d[name, evaluation]) for name in SCHEMES})

    real = [name for name in SCHEMES if all(d[name, e] > REAL * s[e] for e in EVALUATIONS)]
    verdict = ", ".join(f"`{name}`" for name in real) or "No scheme"
    ratios = {name: f"{d[name, 'own'] / s['own']:.1f}" for name in SCHEMES}
    before = _listed({name: _signed(fmean(runs.apart(name, "own", 0))) for name in SCHEMES})
    to_twin = {name: runs.apart(name, "sdpa", of=TWIN) for name in SCHEMES}
    to_twin_means = _listed({name: _signed(fmean(x)) for name, x in to_twin.items()})
    every = [x for each in to_twin.values() for x in each]
    count = len(runs.seeds)
    low, high = ((count / chi2.ppf(q, count)) ** 0.5 for q in (0.975, 0.025))
    setting = runs.one["setting"]
    learnt = fmean(
        [
            runs.loss(REFERENCE, seed, "sdpa", 0) - runs.loss(REFERENCE, seed, "sdpa")
            for seed in runs.seeds
        ]
    )
    paragraphs = (
        f"""**Chance.** `{TWIN}` computes the same attention as `sdpa`, in 16 bit too. Its
        deviation s, the root mean square of its differences to `sdpa` over the seeds, is
        {s["own"]:.5f} nats by its own attention and {s["sdpa"]:.5f} by `sdpa`.""",
        f"""**{verdict} differs from `sdpa` by more than {REAL:g} s under both evaluations.** This
        is the rule of [the experiments](pretraining_experiment.md) in pretraining. No rule was
        written down before these runs. By their own attention the mean differences are
        {means("own")}, which are {_listed(ratios)} times s.""",
        f"""**The own evaluation contains the rounding of the forward.** Before the first step all
        weights are the same, and the differences are {before} already. By `sdpa` they are 0 then,
        and show what training made of the weights: after the last step {means("sdpa")}. Training
        reduces the loss by {learnt:.3f} nats.""",
        f"""**The differences of a seed are not independent.** All are taken from the same run of
        `sdpa`, which is subject to chance as well. If the loss of `{TWIN}` is subtracted instead
        of that of `sdpa`, the mean differences evaluated by `sdpa` are {to_twin_means};
        {sum(x > 0 for x in every)} of the {len(every)} differences are positive. These
        runs do not exclude that training with INT8 costs that much.""",
        f"""**What these runs cannot show.** s is from {count} seeds: its 95 % interval reaches from
        {low:.2f} to {high:.1f} times its value. A seed is an order of the training sequences; the
        first weights are those of one model. There is one text, one learning rate, and
        {setting["steps"] * setting["rows"] * setting["tokens"] / 1e6:.1f}M tokens. Gaps that need
        more steps, larger logits or another learning rate may not appear. Nothing follows for
        training from random weights.""",
    )
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def curves() -> None:
    """The difference to sdpa of every run, at every evaluation."""
    runs = Runs.read(DATA)
    figure, panels = plt.subplots(1, 2, figsize=plots.WIDE, sharey=True, layout="constrained")
    colors = dict(zip((TWIN, *SCHEMES), (plots.GREY, *plots.COLORS), strict=False))
    for axes, (evaluation, title) in zip(
        panels, {"own": "its own attention", "sdpa": "sdpa"}.items(), strict=True
    ):
        for name, color in colors.items():
            at = range(len(runs.steps))
            by_seed = list(zip(*(runs.apart(name, evaluation, i) for i in at), strict=True))
            for each in by_seed:
                axes.plot(runs.steps, each, color=color, linewidth=0.7, alpha=0.5)
            mean = [fmean(each) for each in zip(*by_seed, strict=True)]
            axes.plot(runs.steps, mean, color=color, label=name)
        axes.set(title=f"Evaluated by {title}", xlabel="step")
        axes.axhline(0.0, color=plots.INK, linewidth=0.8)
    panels[0].set_ylabel("held-out loss, minus that of sdpa")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    plt.show()


def _listed(cells: dict[str, str]) -> str:
    words = [f"{x} (`{name}`)" for name, x in cells.items()]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _signed(x: float) -> str:
    return f"{x:+.5f}".replace("-", "\u2212")
