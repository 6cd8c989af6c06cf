"""Runs compared in one HTML file: nothing outside the file is loaded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

import sagesim
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
    gradient,
    layer_errors,
    measured_attentions,
    over_seeds,
    pooled_error,
    settings,
    smoothed,
    varying,
)
from sagesim.experiments.pretrain.model import SIZES
from sagesim.metrics import TITLES
from sagesim.report import number

TABLE_2: Final = ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
PAPER_TABLE_2: Final = (
    (0.9973, 0.9917, 1.0000, 0.9789, 0.9969, 0.9664, 0.9537, 0.9985),
    (0.0736, 0.1293, 0.0000, 0.2045, 0.0793, 0.2579, 0.3074, 0.0540),
)
"""Cosine and relative L2 of `TABLE_2`. Source: arXiv 2603.02170, Table 2."""

_CURVES: Final = ("o", "ds", "dq", "dk")
_TENSORS: Final = {
    "sigma_q": "sigma Q", "sigma_k": "sigma K", "gamma_q_rms": "gamma Q", "gamma_k_rms": "gamma K",
    "rms_p": "RMS P", "rms_dp": "RMS dP", "rms_ds": "RMS dS",
}  # fmt: skip
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
    import jinja2
    import markupsafe

    if not runs:
        raise ValueError("no runs to compare")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sagesim"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
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
        finals=list(_finals(found, margin)),
        table2=TABLE_2,
        titles=TITLES | {"delta": "δ"},
        errors=list(_errors(found)),
        tensors=list(_tensors(found)),
        tensor_names=list(_TENSORS.values()),
        gradients=list(_gradients(found)),
        runs=[_run(each) for each in runs],
        command=command,
    )


def headline(found: Sequence[Setting], margin: float | None) -> str:
    """The largest difference from 16-bit attention, in a sentence."""
    each = [
        (d, group.attention, setting.title)
        for setting in found
        if setting.reference is not None
        for group in setting.groups
        if group is not setting.reference and (d := difference(group, setting.reference))
    ]
    if not each:
        return f"{sum(len(g.runs) for s in found for g in s.groups)} pretraining runs"
    worst, attention, title = max(each, key=lambda item: abs(item[0].mean))
    where = f" at {title}" if title else ""
    if margin is not None and all(abs(d.mean) <= margin for d, _, _ in each):
        return f"No attention differs from 16 bit by more than {margin} nats in the end"
    return f"{attention} ends {signed(worst.mean)} nats from 16-bit attention{where}"


def signed(x: float) -> str:
    """Four decimals with a sign.

    >>> signed(0.01234), signed(-0.5)
    ('+0.0123', '−0.5000')
    """
    return f"{x:+.4f}".replace("-", "\N{MINUS SIGN}")


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
        x_text=_tokens,
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
        x_text=_tokens,
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


def _finals(found: Sequence[Setting], margin: float | None) -> Iterator[dict[str, Any]]:
    for setting in found:
        for group in setting.groups:
            losses = list(group.finals.values())
            reference = setting.reference
            apart = (
                difference(group, reference)
                if reference not in (None, group) and reference
                else None
            )
            stopped = f"{len(group.stops)} stopped" if group.stops else ""
            yield {
                "setting": setting.title,
                "attention": group.attention,
                "seeds": f"{len(losses)} of {len(group.runs)}",
                "loss": f"{statistics.fmean(losses):.4f}" if losses else stopped or "not done",
                "each": ", ".join(f"{x:.4f}" for x in losses),
                "difference": signed(apart.mean) if apart else "",
                "spread": f"{signed(apart.low)} to {signed(apart.high)}" if apart else "",
                "verdict": ", ".join(
                    filter(None, (apart.verdict(margin) if apart else "", stopped))
                ),
            }


def _errors(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    for setting in found:
        for group in setting.groups:
            for name in measured_attentions(group):
                pooled = [pooled_error(group, name, t) for t in TABLE_2]
                for which, measure in enumerate(("cosine", "relative L2")):
                    yield {
                        "trained": f"{group.attention}, {setting.title}".rstrip(", "),
                        "measured": family_free(name),
                        "measure": measure,
                        "cells": ["" if x is None else _error(x[which], which) for x in pooled],
                    }
    for which, measure in enumerate(("cosine", "relative L2")):
        yield {
            "trained": "the paper's",
            "measured": "sagebwd",
            "measure": measure,
            "cells": [f"{x:.4f}" for x in PAPER_TABLE_2[which]],
        }


def _error(x: float, which: int) -> str:
    return number(x) if which else f"{x:.4f}"


def _tensors(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    for setting in found:
        for group in setting.groups:
            layers = [[p[2] for p in layer_errors(group, "", name)] for name in _TENSORS]
            if any(layers):
                yield {
                    "setting": setting.title,
                    "attention": group.attention,
                    "cells": [f"{number(min(x))} to {number(max(x))}" if x else "" for x in layers],
                }


def _gradients(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    for setting in found:
        for group in setting.groups:
            plain = gradient(group, "")
            for name in measured_attentions(group):
                bias, context = gradient(group, name), group.runs[0].run.context
                if not plain or not bias:
                    continue
                share = bias["bias_square"] / plain["square"]
                visible = bias["visible"] * context
                yield {
                    "setting": setting.title,
                    "attention": group.attention,
                    "measured": family_free(name),
                    "cells": [
                        _tokens(plain["noise_scale"] * context),
                        number(share) if share > 0 else "not seen",
                        number(bias["bias_square_error"] / plain["square"]),
                        signed(bias["bias_along"]),
                        _tokens(visible) if visible > 0 else "",
                        _tokens(float(group.runs[0].run.tokens_per_step)),
                    ],
                }


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


def _run(each: Trained) -> dict[str, Any]:
    speeds = list(each.curve("train", "tokens_per_second").values())
    return {
        "name": each.name,
        "attention": each.run.attention,
        "seed": each.run.seed,
        "steps": f"{each.log.last_step} of {each.run.steps}",
        "speed": f"{statistics.median(speeds):,.0f}" if speeds else "",
        "device": each.log.about.get("device", ""),
        "torch": each.log.about.get("torch", ""),
    }


def _tokens(x: float) -> str:
    """A number of tokens, short.

    >>> _tokens(65536.0), _tokens(2.5e6), _tokens(float("inf"))
    ('66K', '2.5M', '∞')
    """
    if not abs(x) < 1e15:
        return number(x)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(x) >= size:
            return f"{x / size:.{1 if abs(x) < 10 * size else 0}f}{letter}".replace(".0", "")
    return f"{x:.0f}"
