"""A record as figures. Needs matplotlib, which a page may have given a style before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sagesim_kernels.bench.accuracy import OUTPUTS
from sagesim_kernels.bench.cases import PAYOFF_BASE, PAYOFF_SITES
from sagesim_kernels.bench.tables import (
    Panel,
    cases,
    contenders,
    int8_and_16_bit,
    panels,
    ratio,
    sigmas,
)


def figures(document: dict[str, Any]) -> dict[str, Figure]:
    """Every figure that the record has data for, by the name that its file should have."""
    found: dict[str, Figure] = {}
    if panels(document, "speed"):
        found["time"] = times(document)
        for peer in document["settings"]["peers"]:
            if any(peer in case["runs"] for case in cases(document, "speed")):
                found[f"ratio_{peer.replace(' ', '_')}"] = ratios(document, peer)
    if any(sigmas(document, panel) for panel in panels(document, "payoff")):
        found["payoff"] = payoff(document)
    return found


def times(document: dict[str, Any]) -> Figure:
    """Forward and backward together over the length, ours with full lines and peers dashed."""

    def draw(axes: Axes, panel: Panel) -> None:
        for i, name in enumerate(contenders(document)):
            ran = [c for c in cases(document, "speed", panel) if name in c["runs"]]
            lengths = [c["tokens"] for c in ran]
            both = [c["runs"][name]["both"]["ms"] for c in ran]
            style = "o-" if name in document["settings"]["specs"] else "s--"
            axes.loglog(lengths, both, style, base=2, color=f"C{i}", label=name)
        axes.set_yscale("log", base=10)
        axes.set(ylabel="ms, forward and backward")

    return _panelled(document, draw)


def ratios(document: dict[str, Any], peer: str) -> Figure:
    """How many times as fast as a peer each spec is, forward and backward together."""

    def draw(axes: Axes, panel: Panel) -> None:
        for i, name in enumerate(document["settings"]["specs"]):
            ran = [
                c
                for c in cases(document, "speed", panel)
                if name in c["runs"] and peer in c["runs"]
            ]
            many = [ratio(c, name, peer) for c in ran]
            axes.plot([c["tokens"] for c in ran], many, "o-", color=f"C{i}", label=name)
        axes.set_xscale("log", base=2)
        axes.axhline(1.0, color="black", lw=1)
        axes.set(ylabel=f"times as fast as {peer}", ylim=(0, None))

    return _panelled(document, draw)


def payoff(document: dict[str, Any]) -> Figure:
    """For each site: the time that INT8 saves, and what it does to the errors, by head size."""
    timed = panels(document, "payoff")
    sizes = sorted({panel.head_dim for panel in timed})
    figure, axes = plt.subplots(
        len(sizes), 2, figsize=(9.0, 3.4 * len(sizes)), layout="constrained", squeeze=False
    )
    for (left, right), size in zip(axes, sizes, strict=True):
        masks = [panel for panel in timed if panel.head_dim == size]
        height = 0.8 / len(masks)
        for i, panel in enumerate(masks):
            # A site that was not run has no bar.
            at = [j + (i + 0.5) * height - 0.4 for j in range(len(PAYOFF_SITES))]
            label = "causal" if panel.is_causal else "full"
            saved = [_time_saved(document, panel, site) for site in PAYOFF_SITES]
            left.barh(at, saved, height, color=f"C{i}", label=label)
            sigma = min(sigmas(document, panel), default=math.nan)
            grown = [_error_growth(document, panel, site, sigma) for site in PAYOFF_SITES]
            right.barh(at, grown, height, color=f"C{i}", label=f"{label}, sigma {sigma:g}")
        for axis in (left, right):
            axis.set_yticks(range(len(PAYOFF_SITES)), PAYOFF_SITES)
            axis.invert_yaxis()
            axis.set_title(f"head size {size}")
            axis.legend()
        left.set_xlabel(f"% of the time saved by INT8 there, {PAYOFF_BASE.label()} elsewhere")
        left.axvline(0.0, color="black", lw=1)
        right.set_xlabel("error with INT8 there, in errors with 16 bit: RMS of O, dQ, dK, dV")
        right.axvline(1.0, color="black", lw=1)
    return figure


def _time_saved(document: dict[str, Any], panel: Panel, site: str) -> float:
    """Percent; NaN where one of the two was not run."""
    int8, bits16 = int8_and_16_bit(site)
    for case in cases(document, "payoff", panel):
        runs = case["runs"]
        if int8 in runs and bits16 in runs:
            return 100 * (1 - runs[int8]["both"]["ms"] / runs[bits16]["both"]["ms"])
    return math.nan


def _error_growth(document: dict[str, Any], panel: Panel, site: str, sigma: float) -> float:
    """NaN where one of the two was not run."""
    mask = "causal" if panel.is_causal else "full"
    case = document["cases"].get(f"accuracy d{panel.head_dim} {mask} sigma{sigma:g}")
    pair = int8_and_16_bit(site)
    if case is None or any(name not in case["errors"] for name in pair):
        return math.nan
    squares = [sum(case["errors"][name][t] ** 2 for t in OUTPUTS) for name in pair]
    return math.sqrt(squares[0] / squares[1])


def _panelled(document: dict[str, Any], draw: Callable[[Axes, Panel], None]) -> Figure:
    """A panel for each head size and mask, lengths along x, one legend beside them."""
    shown: Sequence[Panel] = panels(document, "speed")
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(9.0, 3.2 * rows), layout="constrained", squeeze=False, sharex=True
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, shown, strict=False):
        draw(axis, panel)
        axis.set(title=str(panel), xlabel="tokens")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return figure
