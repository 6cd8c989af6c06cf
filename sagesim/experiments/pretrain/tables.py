"""The rows of a report's tables, as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sagesim.experiments.pretrain.compare import (
    Difference,
    Setting,
    Trained,
    difference,
    family_free,
    gradient,
    layer_errors,
    measured_attentions,
    pooled_error,
)
from sagesim.report import number

TABLE_2: Final = ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
PAPER_TABLE_2: Final = (
    (0.9973, 0.9917, 1.0000, 0.9789, 0.9969, 0.9664, 0.9537, 0.9985),
    (0.0736, 0.1293, 0.0000, 0.2045, 0.0793, 0.2579, 0.3074, 0.0540),
)
"""Cosine and relative L2 of `TABLE_2`. Source: arXiv 2603.02170, Table 2."""

TENSORS_SHOWN: Final = {
    "sigma_q": "sigma Q", "sigma_k": "sigma K", "gamma_q_rms": "gamma Q", "gamma_k_rms": "gamma K",
    "rms_p": "RMS P", "rms_dp": "RMS dP", "rms_ds": "RMS dS",
}  # fmt: skip


def signed(x: float) -> str:
    """Four decimals with a sign.

    >>> signed(0.01234), signed(-0.5)
    ('+0.0123', '−0.5000')
    """
    return f"{x:+.4f}".replace("-", "\N{MINUS SIGN}")


def with_error(apart: Difference) -> str:
    """The mean of differences, and its error where there is one.

    >>> with_error(Difference(0.05, 0.04, 0.06, 2, 0.01))
    '+0.0500 ± 0.0100'
    """
    return signed(apart.mean) + ("" if apart.error is None else f" ± {apart.error:.4f}")


def finals(found: Sequence[Setting], margin: float | None) -> Iterator[dict[str, Any]]:
    """Losses in the end, and their differences from the reference."""
    for setting in found:
        for group in setting.groups:
            losses = list(group.finals.values())
            apart = difference(setting, group)
            stopped = f"{len(group.stops)} stopped" if group.stops else ""
            yield {
                "group": setting.title,
                "attention": group.attention,
                "seeds": f"{len(losses)} of {len(group.runs)}",
                "loss": f"{statistics.fmean(losses):.4f}" if losses else stopped or "not done",
                "difference": signed(apart.mean) if apart else "",
                "error": f"{apart.error:.4f}" if apart and apart.error is not None else "",
                "spread": f"{signed(apart.low)} to {signed(apart.high)}" if apart else "",
                "verdict": ", ".join(
                    filter(None, (apart.verdict(margin) if apart else "", stopped))
                ),
            }


def errors(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Errors of every intermediate over layers and seeds; the paper's last."""
    for setting in found:
        for group in setting.groups:
            for name in measured_attentions(group):
                pooled = [pooled_error(group, name, t) for t in TABLE_2]
                for which, measure in enumerate(("cosine", "relative L2")):
                    yield {
                        "group": f"Trained with {group.attention}, {setting.title}".rstrip(", "),
                        "measured": family_free(name),
                        "measure": measure,
                        "cells": ["" if x is None else _error(x[which], which) for x in pooled],
                    }
    for which, measure in enumerate(("cosine", "relative L2")):
        yield {
            "group": "The paper's Table 2",
            "measured": "sagebwd",
            "measure": measure,
            "cells": [f"{x:.4f}" for x in PAPER_TABLE_2[which]],
        }


def _error(x: float, which: int) -> str:
    return number(x) if which else f"{x:.4f}"


def tensors(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Deviations, gains and root mean squares, from the smallest layer to the largest."""
    for setting in found:
        for group in setting.groups:
            layers = [[p[2] for p in layer_errors(group, "", name)] for name in TENSORS_SHOWN]
            if any(layers):
                yield {
                    "group": setting.title,
                    "attention": group.attention,
                    "cells": [f"{number(min(x))} to {number(max(x))}" if x else "" for x in layers],
                }


def gradients(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Noise and bias of the gradient."""
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
                    "group": setting.title,
                    "attention": group.attention,
                    "measured": family_free(name),
                    "cells": [
                        tokens(plain["noise_scale"] * context),
                        number(share) if share > 0 else "not seen",
                        number(bias["bias_square_error"] / plain["square"]),
                        signed(bias["bias_along"]),
                        tokens(visible) if visible > 0 else "",
                        tokens(float(group.runs[0].run.tokens_per_step)),
                    ],
                }


def run(each: Trained) -> dict[str, Any]:
    """What a run was."""
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


def tokens(x: float) -> str:
    """A number of tokens, short.

    >>> tokens(65536.0), tokens(2.5e6), tokens(float("inf"))
    ('66K', '2.5M', '∞')
    """
    if not abs(x) < 1e15:
        return number(x)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(x) >= size:
            return f"{x / size:.{1 if abs(x) < 10 * size else 0}f}{letter}".replace(".0", "")
    return f"{x:.0f}"
