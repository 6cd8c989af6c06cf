"""The figures of a record. Needs matplotlib, and uses the style that is set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sagesim_kernels.bench.accuracy import OUTPUTS
from sagesim_kernels.bench.cases import PAYOFF_BASE, PAYOFF_SITES
from sagesim_kernels.bench.machine import foreign
from sagesim_kernels.bench.tables import (
    Panel,
    cases,
    errors_of,
    int8_and_16_bit,
    panels,
    ratio,
    sigmas,
)

_MARKERS: Final = "oDv^sPX*h"
"""One for each contender, because a style may have fewer colours than there are contenders."""


def figures(document: dict[str, Any]) -> dict[str, Figure]:
    """Every figure that the record has data for, by the name for its file.

    Figures name the code that was timed, if it is not that of the GPU itself.
    """
    found: dict[str, Figure] = {}
    if panels(document, "speed"):
        found["time"] = times(document)
        for peer in peers_that_ran(document):
            found[f"ratio_{peer.replace(' ', '_')}"] = ratios(document, peer)
    if any(sigmas(document, panel) for panel in panels(document, "payoff")):
        found["payoff"] = payoff(document)
    code = foreign(document)
    if code is not None:
        for figure in found.values():
            figure.supxlabel(code, fontsize="medium")
    return found


def peers_that_ran(document: dict[str, Any]) -> list[str]:
    """Peers that were timed at some shape."""
    timed = cases(document, "speed")
    return [p for p in document["settings"]["peers"] if any(p in c["runs"] for c in timed)]


def times(document: dict[str, Any]) -> Figure:
    """The time of forward and backward over the number of tokens.

    Our specs have solid lines, peers dashed ones. A peer that ran at no shape is left out.
    """
    specs = document["settings"]["specs"]
    shown = [*specs, *peers_that_ran(document)]

    def draw(axes: Axes, panel: Panel) -> None:
        for i, name in enumerate(shown):
            ran = [c for c in cases(document, "speed", panel) if name in c["runs"]]
            lengths = [c["tokens"] for c in ran]
            both = [c["runs"][name]["both"]["ms"] for c in ran]
            style = _MARKERS[i % len(_MARKERS)] + ("-" if name in specs else "--")
            axes.plot(lengths, both, style, color=f"C{i}", label=name)
        axes.set(ylabel="ms, forward and backward", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())

    return _panelled(document, draw)


def ratios(document: dict[str, Any], peer: str) -> Figure:
    """Speed relative to one peer over the number of tokens, forward and backward together."""

    def draw(axes: Axes, panel: Panel) -> None:
        for i, name in enumerate(document["settings"]["specs"]):
            ran = [
                c
                for c in cases(document, "speed", panel)
                if name in c["runs"] and peer in c["runs"]
            ]
            many = [ratio(c, name, peer) for c in ran]
            style = _MARKERS[i % len(_MARKERS)] + "-"
            axes.plot([c["tokens"] for c in ran], many, style, color=f"C{i}", label=name)
        axes.axhline(1.0, color="black", lw=1)
        axes.set(ylabel=f"times as fast as {peer}", ylim=(0, None))

    return _panelled(document, draw)


def payoff(document: dict[str, Any]) -> Figure:
    """For each site: the time that INT8 saves and the errors that it adds, by head size.

    Errors are those at the smallest sigma. A site has no bar if INT8 or 16 bit did not run.
    """
    timed = panels(document, "payoff")
    sizes = sorted({panel.head_dim for panel in timed})
    sigma = min((s for panel in timed for s in sigmas(document, panel)), default=math.nan)
    figure, axes = plt.subplots(
        len(sizes),
        2,
        figsize=(9.0, 3.4 * len(sizes)),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for (left, right), size in zip(axes, sizes, strict=True):
        masks = [panel for panel in timed if panel.head_dim == size]
        height = 0.8 / len(masks)
        for i, panel in enumerate(masks):
            at = [j + (i + 0.5) * height - 0.4 for j in range(len(PAYOFF_SITES))]
            style: dict[str, Any] = {"color": f"C{i}", "label": panel.mask}
            saved = [_time_saved(document, panel, site) for site in PAYOFF_SITES]
            left.barh(at, saved, height, **style)
            grown = [_error_growth(document, panel, site, sigma) for site in PAYOFF_SITES]
            right.barh(at, grown, height, **style)
        left.set_yticks(range(len(PAYOFF_SITES)), PAYOFF_SITES)
        left.set(title=f"head size {size}: % of the time saved")
        left.axvline(0.0, color="black", lw=1)
        right.set(title=f"RMS error relative to 16 bit, sigma {sigma:g}")
        right.axvline(1.0, color="black", lw=1)
    axes[0, 0].invert_yaxis()  # all panels share it
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = f"INT8 there, {PAYOFF_BASE.label()} elsewhere"
    figure.legend(handles, labels, title=title, loc="outside upper center", ncols=len(labels))
    return figure


def _time_saved(document: dict[str, Any], panel: Panel, site: str) -> float:
    """Percent of the 16-bit time; NaN if INT8 or 16 bit did not run."""
    int8, bits16 = int8_and_16_bit(site)
    for case in cases(document, "payoff", panel):
        runs = case["runs"]
        if int8 in runs and bits16 in runs:
            return 100 * (1 - runs[int8]["both"]["ms"] / runs[bits16]["both"]["ms"])
    return math.nan


def _error_growth(document: dict[str, Any], panel: Panel, site: str, sigma: float) -> float:
    """The RMS error in INT8 relative to 16 bit; NaN if one of them did not run."""
    errors, pair = errors_of(document, panel, sigma), int8_and_16_bit(site)
    if any(name not in errors for name in pair):
        return math.nan
    squares = [sum(errors[name][t] ** 2 for t in OUTPUTS) for name in pair]
    return math.sqrt(squares[0] / squares[1])


def _panelled(document: dict[str, Any], draw: Callable[[Axes, Panel], None]) -> Figure:
    """A panel for each head size and mask, over the number of tokens, with one legend."""
    shown: Sequence[Panel] = panels(document, "speed")
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(9.0, 3.2 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, shown, strict=False):
        draw(axis, panel)
        lengths = [case["tokens"] for case in cases(document, "speed", panel)]
        axis.set(title=str(panel), xlabel="tokens", xscale="log")
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.minorticks_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    return figure
