"""Line charts with bands, as SVG to include in an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 520
HEIGHT: Final = 300
COLOURS: Final = 8
"""Colours of the page's style sheet. Lines with higher colour numbers are dashed."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 44


@dataclass(frozen=True, slots=True)
class Line:
    """A line and its band."""

    name: str
    colour: int  #: number of the colour; see `COLOURS`
    points: Sequence[tuple[float, float, float, float]]  #: (x, low, middle, high), sorted by x


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_title: str,
    y_title: str,
    identifier: str,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
    band: tuple[float, float] | None = None,
    x_text: Callable[[float], str] = lambda x: f"{x:g}",
) -> str:
    """Draw lines as an SVG element.

    Points that are not finite are left out. With `log_y`, so are points with a value that is not
    positive.

    Args:
        identifier: an id for the SVG's clip path, unique in the page.
        y_range: the range of the y axis; by default it covers all points and the band.
        band: a range of y to shade over the whole width.
        x_text: formats the labels of the x axis.
    """
    kept = [Line(line.name, line.colour, _finite(line.points, log_y)) for line in lines]
    xs = [p[0] for line in kept for p in line.points]
    ys = [y for line in kept for p in line.points for y in p[1:]]
    if not xs:
        return f'<p class="soft">{escape(title)}: nothing was measured.</p>'
    low, high = y_range or _around(min(ys + list(band or ())), max(ys + list(band or ())), log_y)
    x_low, x_high = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 1, max(xs) + 1)

    def at_x(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        a, b, c = (math.log(z) if log_y else z for z in (y, low, high))
        return HEIGHT - _BOTTOM - (a - b) / (c - b) * (HEIGHT - _TOP - _BOTTOM)

    inside = (_LEFT, _TOP, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        f"<title>{escape(title)}</title>",
        f'<clipPath id="{identifier}"><rect x="{inside[0]}" y="{inside[1]}" '
        f'width="{inside[2]}" height="{inside[3]}"/></clipPath>',
    ]
    for y in ticks_log(low, high) if log_y else ticks(low, high):
        parts.append(f'<path class="grid" d="M{_LEFT} {at_y(y):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 8}" y="{at_y(y) + 4:.1f}">{_number(y)}</text>')
    for x in ticks(x_low, x_high):
        parts.append(
            f'<text class="x" x="{at_x(x):.1f}" y="{HEIGHT - _BOTTOM + 18}">'
            f"{escape(x_text(x))}</text>"
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="x" x="{middle}" y="{HEIGHT - 6}">{escape(x_title)}</text>')
    half = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text class="x" transform="translate(13 {half}) rotate(-90)">{escape(y_title)}</text>'
    )
    parts.append(f'<g clip-path="url(#{identifier})">')
    if band is not None:
        top, bottom = at_y(band[1]), at_y(band[0])
        parts.append(
            f'<rect class="margin" x="{_LEFT}" y="{top:.1f}" width="{inside[2]}" '
            f'height="{bottom - top:.1f}"/>'
        )
    for line in kept:
        parts.append(_drawn(line, at_x, at_y))
    parts.append("</g></svg>")
    return "".join(parts)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers from low to high.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / wanted
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(float(i * step), 12) for i in range(first, last + 1)]


def ticks_log(low: float, high: float) -> list[float]:
    """Powers of ten from low to high; also 2 and 5 times these if there are few powers.

    >>> ticks_log(0.01, 0.1)
    [0.01, 0.02, 0.05, 0.1]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    many = len(powers) > 4
    every = [m * 10.0**p for p in powers for m in ((1,) if many else (1, 2, 5))]
    return [float(f"{y:g}") for y in every if low * 0.999 <= y <= high * 1.001]


def _finite(
    points: Sequence[tuple[float, float, float, float]], log_y: bool
) -> list[tuple[float, float, float, float]]:
    return [p for p in points if all(map(math.isfinite, p)) and (not log_y or min(p[1:]) > 0)]


def _around(low: float, high: float, log_y: bool) -> tuple[float, float]:
    """The range from low to high with a margin on both sides."""
    if log_y:
        return low / 1.15, high * 1.15
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _drawn(line: Line, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    colour = f"c{line.colour % COLOURS}" + (" dashed" if line.colour >= COLOURS else "")
    upper = [f"{at_x(x):.1f} {at_y(high):.1f}" for x, _, _, high in line.points]
    lower = [f"{at_x(x):.1f} {at_y(low):.1f}" for x, low, _, _ in line.points]
    centre = [(at_x(x), at_y(y)) for x, _, y, _ in line.points]
    if not centre:
        return ""
    area = f'<path class="spread {colour}" d="M{"L".join(upper + lower[::-1])}Z"/>'
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in centre)
    name = f"<title>{escape(line.name)}</title>"
    stroke = f'<path class="line {colour}" d="M{path}">{name}</path>'
    # Dots show where a line with few points was measured.
    dots = "".join(
        f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in centre
    )
    return area + stroke + (dots if len(centre) <= 24 else "")


def _number(y: float) -> str:
    text = f"{y:.3g}" if abs(y) >= 1e-3 or y == 0 else f"{y:.0e}"
    return text.replace("-", "\N{MINUS SIGN}").replace("e\N{MINUS SIGN}0", "e\N{MINUS SIGN}")
