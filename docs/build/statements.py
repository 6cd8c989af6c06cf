"""All statements of `theory` with their measurements, as a figure and as HTML tables."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from plots import BLUE, INK, ORANGE

from theory.checks import CHECKS
from theory.checks.check import Check

COLUMNS = ("statement", "measured on", "bound", "measured", "ratio", "holds")

Found = Mapping[str, Sequence[Check]]


def measure(topics: Iterable[str]) -> dict[str, list[Check]]:
    """Run the checks of these topics; returns them by topic."""
    return {topic: list(CHECKS[topic]()) for topic in topics}


def figure(found: Found) -> Figure:
    """A figure of measured / predicted of every check: bounds on the left, estimates on the right.

    Each topic is a row. Ratios of 0 are omitted.
    """
    fig, axes = plt.subplots(1, 2, figsize=(9, 0.9 + 0.34 * len(found)), layout="constrained")
    rng = random.Random(0)
    for axis, is_bound, title, color in (
        (axes[0], True, "upper bounds", BLUE),
        (axes[1], False, "estimates", ORANGE),
    ):
        for row, checks in enumerate(found.values()):
            ratios = [c.ratio for c in checks if (c.within is None) == is_bound and c.ratio > 0]
            jitter = [row + rng.uniform(-0.25, 0.25) for _ in ratios]
            axis.plot(ratios, jitter, "o", ms=4, alpha=0.45, mew=0, color=color)
        axis.axvline(1, color=INK, lw=1)
        axis.set(title=title, xlabel="measured / predicted", yticks=range(len(found)))
        axis.set_yticklabels(found if is_bound else [])
        axis.set_ylim(len(found) - 0.5, -0.5)
    axes[0].set_xscale("log")
    axes[0].set_xlim(None, 1.3)
    return fig


def html(found: Found) -> str:
    """HTML: the number of statements that hold, then a collapsible table for each topic.

    The table of a topic with a failed statement is open. The ratio is also drawn as a bar.
    """
    every = [c for checks in found.values() for c in checks]
    held = sum(c.holds for c in every)
    parts = "".join(_topic(topic, checks) for topic, checks in found.items())
    return f"<p><strong>{held} of {len(every)} statements hold.</strong></p>{parts}"


def _topic(topic: str, checks: Sequence[Check]) -> str:
    head = "".join(f"<th scope='col'>{escape(c)}</th>" for c in COLUMNS)
    rows = "".join(_row(c) for c in checks)
    held = sum(c.holds for c in checks)
    return (
        f"<details class='statements'{'' if held == len(checks) else ' open'}>"
        f"<summary><strong>{topic}</strong> {held} of {len(checks)} hold</summary>"
        f"<div class='table-wrapper'><table class='statements'><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _row(c: Check) -> str:
    claim = f"{c.predicted:.3g}" + ("" if c.within is None else f" ± {c.within:.0%}")
    full = f"{100 * min(max(c.ratio, 0.0), 1.0):.0f}%" if c.ratio == c.ratio else "0%"
    ratio = f"<span class='ratio' style='--full: {full}'>{c.ratio:.3f}</span>"
    word = "yes" if c.holds else "<strong>no</strong>"
    text = f"<td>{escape(c.statement)}</td><td>{escape(c.inputs)}</td>"
    numbers = "".join(f"<td class='number'>{x}</td>" for x in (claim, f"{c.measured:.3g}", ratio))
    return f"<tr>{text}{numbers}<td>{word}</td></tr>"
