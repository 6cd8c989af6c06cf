"""The figures of a record. Needs matplotlib, and uses the style that is set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from sagesim_kernels.bench.accuracy import OUTPUTS
from sagesim_kernels.bench.cases import PAYOFF_BASE, PAYOFF_SITES
from sagesim_kernels.bench.machine import foreign
from sagesim_kernels.bench.tables import (
    FRONTIER_PEER,
    Panel,
    cases,
    errors_of,
    frontier_of,
    frontier_points,
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
    if any(frontier_points(document, d) for d in _head_sizes(document)):
        found["frontier"] = frontier(document)
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


def frontier(document: dict[str, Any], *, note: str | None = None) -> Figure:
    """Time against the error of the gradients: a point for each spec and each peer.

    A panel for each head size. Another contender is faster and more accurate than what is in the
    grey region. Thin lines go from the least to the greatest figure over masks and lengths (time),
    and over inputs (error).

    note: a line below the panels, of the record.
    """
    sizes = [d for d in _head_sizes(document) if frontier_points(document, d)]
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(9.6, 5.2), layout="constrained", squeeze=False, sharey=True
    )
    names = list(dict.fromkeys(p.name for d in sizes for p in frontier_points(document, d)))
    ours = [name for name in names if name in document["settings"]["specs"]]
    peers = [name for name in names if name not in ours]
    handles: dict[str, Any] = {}
    colors = len(plt.rcParams["axes.prop_cycle"])
    for axis, d in zip(axes.flat, sizes, strict=True):
        axis.set(title=f"head size {d}", xscale="log", yscale="log")
        points = frontier_points(document, d)
        for p in points:
            is_ours = p.name in ours
            which = (ours if is_ours else peers).index(p.name)
            color = f"C{which % colors}" if is_ours else _PEER_COLOR
            marker = _SPEC_MARKERS[which // colors] if is_ours else _PEER_MARKERS[which]
            thin: dict[str, Any] = {"color": color, "lw": 1, "alpha": 0.45}
            axis.plot([p.least_time, p.most_time], [p.error] * 2, **thin)
            axis.plot([p.time] * 2, [p.least_error, p.most_error], **thin)
            style: dict[str, Any] = {"mfc": color if is_ours else "white", "mew": 1.6, "ms": 8.5}
            drawn = axis.plot([p.time], [p.error], marker, color=color, zorder=3, **style)
            handles[p.name] = drawn[0]
        axis.set_xlabel(f"time relative to {FRONTIER_PEER}")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter("{x:g}")
            side.set_minor_formatter(NullFormatter())
    for axis, d in zip(axes.flat, sizes, strict=True):  # now that the limits are known
        right, top = axis.get_xlim()[1], axis.get_ylim()[1]
        axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())
        for p in frontier_of(frontier_points(document, d)):
            box = ([p.time, right, right, p.time], [p.error, p.error, top, top])
            axis.fill(*box, color="#F1F3F5", zorder=0)
    axes[0, 0].set_ylabel("relative error of dQ, dK and dV")
    title = "filled: specs; hollow: peers in 16 bit; grey: another is faster and more accurate"
    figure.legend(
        [handles[name] for name in names], names, loc="outside upper center", ncols=5, title=title
    )
    if note is not None:
        figure.supxlabel(fill(note, 110), fontsize="small", color=_PEER_COLOR)
    return figure


_SPEC_MARKERS: Final = "oDsv"
"""The next one when all colors are used."""

_PEER_COLOR: Final = "#52606D"
_PEER_MARKERS: Final = "sDv^PXh<>"


def _head_sizes(document: dict[str, Any]) -> list[int]:
    return sorted({panel.head_dim for panel in panels(document, "speed")})


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
