"""What pretraining runs have been committed, for the page about them.

A run's log is docs/data/pretraining/NAME.parquet, as `sagesim pretrain` wrote it.
"""

from __future__ import annotations

import os
from pathlib import Path

from sagesim.experiments.pretrain.compare import Trained, difference, settings
from sagesim.experiments.pretrain.page import render
from sagesim.experiments.pretrain.plan import Plan
from sagesim.experiments.pretrain.runlog import Log
from sagesim.experiments.pretrain.tables import with_error

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "docs" / "data" / "pretraining"
PLAN = ROOT / "experiments" / "pretrain.toml"

NONE_YET = (
    "**No run of this plan has been committed yet.** What is tested so far are the parts: that "
    "runs resume bit for bit, that several processes train as one, that measurements are what they "
    "say, on models of a quarter of a million parameters that train for seconds on a CPU."
)


def logs() -> list[Trained]:
    """Every committed run, by name."""
    return [Trained(path.stem, Log.read(path)) for path in sorted(LOGS.glob("*.parquet"))]


def finals() -> str:
    """Held-out losses in the end, as Markdown; or that there are none."""
    runs = logs()
    if not runs:
        return NONE_YET
    margin = Plan.read(PLAN).margin
    lines = [
        "| setting | attention | seeds | loss | from sdpa | |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for setting in settings(runs):
        for group in setting.groups:
            losses, apart = list(group.finals.values()), difference(setting, group)
            lines.append(
                f"| {setting.title} | `{group.attention}` | {len(losses)} of {len(group.runs)} | "
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


def report() -> str:
    """Write the report of all runs into the site; returns the HTML that shows it."""
    runs = logs()
    if not runs:
        return "<p>There is no report, as there are no runs.</p>"
    page = render(
        runs, margin=Plan.read(PLAN).margin, command="sagesim report docs/data/pretraining"
    )
    Path(os.environ["SITE"], "report-pretraining.html").write_text(page, encoding="utf-8")
    return (
        '<p><a class="report-link" href="report-pretraining.html">Open the report on a page of its '
        'own</a></p><iframe class="report" src="report-pretraining.html" '
        'title="sagesim report" loading="lazy"></iframe>'
    )
