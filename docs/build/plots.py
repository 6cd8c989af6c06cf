"""The style of the figures: light, legible, and readable without telling red from green.

Importing this module sets matplotlib's style.
"""

from __future__ import annotations

import matplotlib as mpl

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#AA4499"
YELLOW = "#E69F00"
SKY = "#56B4E9"
GREY = "#6B7280"
INK = "#1F2933"

COLORS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY)
"""Colours of series, in this order: the palette of Okabe and Ito with a darker purple."""

WIDE = (9.0, 4.0)
"""Size in inches of a figure as wide as the text, with one row of panels."""

mpl.rcParams.update(
    {
        "axes.axisbelow": True,
        "axes.edgecolor": "#9AA5B1",
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.labelsize": 10.5,
        "axes.prop_cycle": mpl.cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "figure.facecolor": "white",
        "figure.figsize": WIDE,
        "font.size": 10.5,
        "grid.color": "#E4E7EB",
        "grid.linewidth": 0.8,
        "legend.fontsize": 9.5,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5.5,
        "savefig.bbox": "tight",
        "svg.hashsalt": "sagebwd",  # the same figure has the same bytes
        "text.color": INK,
        "xtick.color": "#52606D",
        "ytick.color": "#52606D",
    }
)
