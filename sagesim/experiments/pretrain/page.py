"""Runs compared in one HTML file: nothing outside the file is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import sagesim
from sagesim.experiments.pretrain import tables
from sagesim.experiments.pretrain.chart import Line, line_chart
from sagesim.experiments.pretrain.compare import (
    Group,
    Point,
    Setting,
    Trained,
    describe,
    difference,
    difference_curve,
    family_free,
    layer_errors,
    measured_attentions,
    over_seeds,
    settings,
    smoothed,
    varying,
)
from sagesim.experiments.pretrain.model import SIZES
from sagesim.metrics import TITLES
from sagesim.report import templates

_CURVES: Final = ("o", "ds", "dq", "dk")
_TOLD: Final = ("corpus", "context", "lr", "precision", "qk_norm", "tokens_per_step")
"""What the head of the page says of runs that do not differ in it."""

_EARLY: Final = 0.2
"""The part of the tokens whose losses set no axis."""


def render(runs: Sequence[Trained], *, margin: float | None, command: str) -> str:
    """The report as HTML.

    Args:
        margin: nats; a smaller difference is called none. None says nothing of what counts.
        command: the command line that made the report.

    Raises:
        ValueError: for no runs, or one that is there twice.
        ModuleNotFoundError: without the package jinja2.
    """
    import markupsafe

    if not runs:
        raise ValueError("no runs to compare")
    environment = templates()
    found = settings(runs)
    colours = _colours([g.attention for s in found for g in s.groups])
    measured = _colours(
        [family_free(a) for s in found for g in s.groups for a in measured_attentions(g)], 1
    )
    charts = _charts(found, colours, measured, margin)
    marked = {
        kind: [(title, markupsafe.Markup(svg)) for title, svg in charts[kind]]
        for kind in ("evaluation", "train", "difference")
    }
    layers = [
        (title, [(name, markupsafe.Markup(svg)) for name, svg in several])
        for title, several in charts["layers"]
    ]
    return environment.get_template("runs.html.j2").render(
        headline=headline(found, margin),
        versions={"sagesim": sagesim.__version__},
        stops=[(x.name, x.log.stop) for x in runs if x.log.stop],
        common=list(_common(runs)),
        charts={**marked, "layers": layers},
        attentions=list(colours.items()),
        measured=list(measured.items()),
        margin=margin,
        finals=list(tables.finals(found, margin)),
        table2=tables.TABLE_2,
        titles=TITLES | {"delta": "δ"},
        errors=list(tables.errors(found)),
        tensors=list(tables.tensors(found)),
        tensor_names=list(tables.TENSORS_SHOWN.values()),
        gradients=list(tables.gradients(found)),
        runs=[tables.run(each) for each in runs],
        command=command,
    )


def headline(found: Sequence[Setting], margin: float | None) -> str:
    """The largest difference from 16-bit attention that is not chance, in a sentence."""
    each = [
        (d, group.attention, setting.title)
        for setting in found
        for group in setting.groups
        if (d := difference(setting, group))
    ]
    if not each:
        return f"{sum(len(g.runs) for s in found for g in s.groups)} pretraining runs"
    if margin is not None and all(abs(d.mean) <= margin for d, _, _ in each):
        return f"No attention differs from 16 bit by more than {margin} nats in the end"
    if all(d.is_chance for d, _, _ in each):
        return "In the end no attention differs from 16 bit by more than chance"
    worst, attention, title = max(
        (item for item in each if not item[0].is_chance), key=lambda item: abs(item[0].mean)
    )
    where = f" at {title}" if title else ""
    return f"{attention} ends {tables.signed(worst.mean)} nats from 16-bit attention{where}"


def _colours(names: Sequence[str], first: int = 0) -> dict[str, int]:
    """Each name's number; sdpa, which specs are held against, is always 0."""
    others = [name for name in dict.fromkeys(names) if name != "sdpa"]
    start = max(first, 1) if "sdpa" in names or first else 0
    numbered = {name: start + i for i, name in enumerate(others)}
    return ({"sdpa": 0} if "sdpa" in names else {}) | numbered


def _charts(
    found: Sequence[Setting],
    colours: dict[str, int],
    measured: dict[str, int],
    margin: float | None,
) -> dict[str, list[Any]]:
    charts: dict[str, list[Any]] = {"evaluation": [], "train": [], "difference": [], "layers": []}
    for index, setting in enumerate(found):
        title = setting.title or "all runs"
        for kind in ("evaluation", "train"):
            lines = [
                Line(g.attention, colours[g.attention], _loss(g, kind)) for g in setting.groups
            ]
            charts[kind].append((title, _loss_chart(lines, kind, title, f"{kind}-{index}")))
        if setting.reference is not None and len(setting.groups) > 1:
            charts["difference"].append((title, _difference(setting, colours, margin, index)))
        group = setting.reference or next(iter(setting.groups))
        names = measured_attentions(group)
        if names:
            several = [
                (TITLES[t], _layer_chart(group, names, t, measured, f"layer-{index}-{t}"))
                for t in _CURVES
            ]
            charts["layers"].append((f"{title}, trained with {group.attention}", several))
    return charts


def _loss(group: Group, kind: str) -> list[Point]:
    curves = [x.curve(kind, "loss") for x in group.runs]
    return over_seeds([smoothed(c) for c in curves] if kind == "train" else curves)


def _loss_chart(lines: Sequence[Line], kind: str, title: str, identifier: str) -> str:
    last = max((p[0] for line in lines for p in line.points), default=0.0)
    late = [y for line in lines for p in line.points if p[0] >= _EARLY * last for y in p[1:]]
    air = 0.05 * (max(late) - min(late)) if late else 0.0
    return line_chart(
        lines,
        title=f"{'Held-out' if kind == 'evaluation' else 'Training'} loss, {title}",
        x_title="tokens",
        y_title="nats",
        identifier=identifier,
        y_range=(min(late) - air, max(late) + air) if air else None,
        x_text=tables.tokens,
    )


def _difference(setting: Setting, colours: dict[str, int], margin: float | None, index: int) -> str:
    assert setting.reference is not None
    lines = [
        Line(g.attention, colours[g.attention], difference_curve(g, setting.reference))
        for g in setting.groups
        if g is not setting.reference
    ]
    return line_chart(
        lines,
        title=f"Difference from sdpa, {setting.title}",
        x_title="tokens",
        y_title="nats",
        identifier=f"difference-{index}",
        band=None if margin is None else (-margin, margin),
        x_text=tables.tokens,
    )


def _layer_chart(
    group: Group, names: Sequence[str], tensor: str, measured: dict[str, int], identifier: str
) -> str:
    return line_chart(
        [
            Line(
                family_free(a), measured[family_free(a)], layer_errors(group, a, f"{tensor}_rel_l2")
            )
            for a in names
        ],
        title=f"Relative L2 error of {TITLES[tensor]}",
        x_title="layer",
        y_title="relative L2",
        identifier=identifier,
        log_y=True,
        x_text=lambda x: f"{x:.0f}" if x == int(x) else "",
    )


def _common(runs: Sequence[Trained]) -> Iterator[tuple[str, str]]:
    """What is the same for all."""
    first, differing = runs[0].run, varying([each.run for each in runs])
    size = SIZES[first.size]
    if "size" not in differing:
        count = size.parameters(first.vocabulary, tied=first.tied, qk_norm=first.qk_norm)
        yield (
            "model",
            f"Llama {first.size}: {count:,} parameters, {size.layers} layers of width "
            f"{size.width}, {size.heads} heads of {size.head_size}",
        )
    if "tokens" not in differing:
        yield "tokens of a run", f"{first.tokens:,}"
    alike = [name for name in _TOLD if name not in differing]
    yield "the same for all", ", ".join(describe(name, getattr(first, name)) for name in alike)
    yield "seeds", ", ".join(map(str, sorted({each.run.seed for each in runs})))
