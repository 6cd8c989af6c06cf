"""The report: a comparison of runs as one HTML file that loads nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import sagesim
from sagesim.analysis import TITLES, templates
from sagesim.experiments.paper_table_2 import PAPER_TABLE_2
from sagesim.experiments.pretrain.diagnostics.noise import RELIABLE_SEQUENCES
from sagesim.experiments.pretrain.model.llama import SIZES
from sagesim.experiments.pretrain.report import tables
from sagesim.experiments.pretrain.report.chart import Line, line_chart
from sagesim.experiments.pretrain.report.compare import (
    Group,
    Point,
    Setting,
    TrainedRun,
    describe,
    difference,
    difference_curve,
    differing_fields,
    group_runs,
    label_of,
    layer_errors,
    measured_attentions,
    over_seeds,
    smoothed,
)
from sagesim.experiments.pretrain.report.difference import CHANCE

_CURVES: Final = ("o", "ds", "dq", "dk")
"""Tensors with a chart of errors by layer."""

_HEADER_FIELDS: Final = ("corpus", "context", "lr", "precision", "qk_norm", "tokens_per_step")
"""Fields that the header of the page lists if all runs have the same value."""

_EARLY: Final = 0.2
"""The first fraction of the tokens. Their high losses do not determine the range of an axis."""


def render(runs: Sequence[TrainedRun], *, margin: float | None, command: str) -> str:
    """The report as HTML.

    Args:
        margin: nats; smaller differences of final losses do not count. None shows no verdicts.
        command: the command line that made the report.

    Raises:
        ValueError: if there are no runs, or two runs have the same settings and seed.
        ModuleNotFoundError: if the package jinja2 is not installed.
    """
    import markupsafe

    if not runs:
        raise ValueError("no runs to compare")
    environment = templates("sagesim.experiments.pretrain.report")
    found = group_runs(runs)
    colours = _colours([g.attention for s in found for g in s.groups])
    measured = _colours(
        [label_of(a) for s in found for g in s.groups for a in measured_attentions(g)], 1
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
        stops=[(x.name, x.stop) for x in runs if x.stop],
        common=list(_common(runs)),
        charts={**marked, "layers": layers},
        attentions=list(colours.items()),
        measured=list(measured.items()),
        margin=margin,
        finals=list(tables.final_loss_rows(found, margin)),
        table2=list(PAPER_TABLE_2),
        titles=TITLES | {"delta": "δ"},
        errors=list(tables.error_rows(found)),
        tensors=list(tables.tensor_rows(found)),
        tensor_names=list(tables.TENSORS_SHOWN.values()),
        gradients=list(tables.gradient_rows(found)),
        reliable=RELIABLE_SEQUENCES,
        runs=[tables.run_row(each) for each in runs],
        command=command,
    )


def headline(found: Sequence[Setting], margin: float | None) -> str:
    """One sentence about the largest difference from 16-bit attention that is not chance.

    It is one of several differences, so its probability is multiplied by their number.
    """
    each = [
        (d, group.attention, setting.title)
        for setting in found
        for group in setting.groups
        if (d := difference(setting, group))
    ]
    if not each:
        return f"{sum(len(g.runs) for s in found for g in s.groups)} pretraining runs"
    if margin is not None and all(abs(d.mean) <= margin for d, _, _ in each):
        return f"No attention differs from 16 bit by more than {margin} nats of final loss"
    if all(d.error is None for d, _, _ in each):
        return "One seed does not tell whether an attention differs from 16 bit in final loss"
    sure = [x for x in each if not x[0].is_chance and x[0].probability * len(each) < CHANCE]
    if not sure:
        return "No attention differs from 16 bit in final loss by more than chance"
    worst, attention, title = max(sure, key=lambda item: abs(item[0].mean))
    where = f" at {title}" if title else ""
    return (
        f"The final loss of {attention} differs by {tables.signed(worst.mean)} nats from that of "
        f"16-bit attention{where}"
    )


def _colours(names: Sequence[str], first: int = 0) -> dict[str, int]:
    """A colour number for each name. sdpa, the reference, always has number 0."""
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
    late = [
        y
        for line in lines
        for p in line.points
        if p[0] >= _EARLY * last and all(map(math.isfinite, p))
        for y in p[1:]
    ]
    margin = 0.05 * (max(late) - min(late)) if late else 0.0
    return line_chart(
        lines,
        title=f"{'Held-out' if kind == 'evaluation' else 'Training'} loss, {title}",
        x_title="tokens",
        y_title="nats",
        identifier=identifier,
        y_range=(min(late) - margin, max(late) + margin) if margin else None,
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
            Line(label_of(a), measured[label_of(a)], layer_errors(group, a, f"{tensor}_rel_l2"))
            for a in names
        ],
        title=f"Relative L2 error of {TITLES[tensor]}",
        x_title="layer",
        y_title="relative L2",
        identifier=identifier,
        log_y=True,
        x_text=lambda x: f"{x:.0f}" if x == int(x) else "",
    )


def _common(runs: Sequence[TrainedRun]) -> Iterator[tuple[str, str]]:
    """Labels and values of the settings that all runs share."""
    first, differing = runs[0].run, differing_fields([each.run for each in runs])
    size = SIZES[first.size]
    if "size" not in differing:
        count = size.parameters(first.vocabulary, tied=first.tied, qk_norm=first.qk_norm)
        yield (
            "model",
            f"Llama {first.size}: {count:,} parameters, {size.layers} layers of width "
            f"{size.width}, {size.heads} heads of {size.head_size}",
        )
    if "tokens" not in differing:
        yield "tokens per run", f"{first.tokens:,}"
    same = [name for name in _HEADER_FIELDS if name not in differing]
    yield (
        "same for all runs",
        ", ".join(describe(name, getattr(first, name)) for name in same),
    )
    yield "seeds", ", ".join(map(str, sorted({each.run.seed for each in runs})))
