"""The rows of the report's tables, with all numbers formatted as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sagesim.analysis import number
from sagesim.experiments.paper_table_2 import PAPER_TABLE_2
from sagesim.experiments.pretrain.diagnostics.noise import RELIABLE_SEQUENCES
from sagesim.experiments.pretrain.report.compare import (
    Setting,
    TrainedRun,
    difference,
    gradient_numbers,
    label_of,
    layer_errors,
    measured_attentions,
    pooled_error,
)
from sagesim.experiments.pretrain.report.difference import Difference

TENSORS_SHOWN: Final = {
    "sigma_q": "sigma Q", "sigma_k": "sigma K", "gamma_q_rms": "gamma Q", "gamma_k_rms": "gamma K",
    "rms_p": "RMS P", "rms_dp": "RMS dP", "rms_ds": "RMS dS",
}  # fmt: skip


def signed(x: float) -> str:
    """A number with a sign and four decimals.

    >>> signed(0.01234), signed(-0.5)
    ('+0.0123', '−0.5000')
    """
    return f"{x:+.4f}".replace("-", "\N{MINUS SIGN}")


def with_error(gap: Difference) -> str:
    """The mean of a difference, with its standard error if it has one.

    >>> with_error(Difference(0.05, 0.04, 0.06, 2, 0.01))
    '+0.0500 ± 0.0100'
    """
    return signed(gap.mean) + ("" if gap.error is None else f" ± {gap.error:.4f}")


def final_loss_rows(found: Sequence[Setting], margin: float | None) -> Iterator[dict[str, Any]]:
    """Final held-out losses, and their differences from the reference."""
    for setting in found:
        for group in setting.groups:
            losses = list(group.finals.values())
            gap = difference(setting, group)
            stopped = f"{len(group.stops)} stopped" if group.stops else ""
            yield {
                "group": setting.title,
                "attention": group.attention,
                "seeds": f"{len(losses)} of {len(group.runs)}",
                "loss": f"{statistics.fmean(losses):.4f}" if losses else stopped or "not done",
                "difference": signed(gap.mean) if gap else "",
                "error": f"{gap.error:.4f}" if gap and gap.error is not None else "",
                "spread": f"{signed(gap.low)} to {signed(gap.high)}" if gap else "",
                "verdict": ", ".join(filter(None, (gap.verdict(margin) if gap else "", stopped))),
            }


def error_rows(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Errors of the intermediates, pooled over layers and seeds; then those of the paper."""
    for setting in found:
        for group in setting.groups:
            for name in measured_attentions(group):
                pooled = [pooled_error(group, name, t) for t in PAPER_TABLE_2]
                for which, measure in enumerate(("cosine", "relative L2")):
                    yield {
                        "group": f"Trained with {group.attention}, {setting.title}".rstrip(", "),
                        "measured": label_of(name),
                        "measure": measure,
                        "cells": ["" if x is None else _error(x[which], which) for x in pooled],
                    }
    for which, measure in enumerate(("cosine", "relative L2")):
        yield {
            "group": "The paper's Table 2",
            "measured": "sagebwd",
            "measure": measure,
            "cells": [f"{values[which]:.4f}" for values in PAPER_TABLE_2.values()],
        }


def _error(x: float, which: int) -> str:
    return number(x) if which else f"{x:.4f}"


def tensor_rows(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """The numbers of `TENSORS_SHOWN`, each as the range over layers."""
    for setting in found:
        for group in setting.groups:
            layers = [[p[2] for p in layer_errors(group, "", name)] for name in TENSORS_SHOWN]
            if any(layers):
                yield {
                    "group": setting.title,
                    "attention": group.attention,
                    "cells": [f"{number(min(x))} to {number(max(x))}" if x else "" for x in layers],
                }


def gradient_rows(found: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Noise and bias of the gradient."""
    for setting in found:
        for group in setting.groups:
            plain = gradient_numbers(group, "")
            for name in measured_attentions(group):
                bias, context = gradient_numbers(group, name), group.runs[0].run.context
                if not plain or not bias:
                    continue
                # The runs of a group may differ in it.
                fewest = min(each.run.monitor_sequences for each in group.runs)
                doubt = "" if fewest >= RELIABLE_SEQUENCES else ", unreliable"
                square, of_g = bias["bias_square"], plain["square"]
                visible = bias["visible"] * context
                yield {
                    "group": setting.title,
                    "attention": group.attention,
                    "measured": label_of(name),
                    "cells": [
                        tokens(plain["noise_scale"] * context),
                        number(square / of_g) if square > 0 and of_g > 0 else "not resolved",
                        number(bias["bias_square_error"] / of_g) + doubt if of_g > 0 else "",
                        signed(bias["bias_along"]),
                        tokens(visible) if visible > 0 else "",
                        tokens(float(group.runs[0].run.tokens_per_step)),
                    ],
                }


def run_row(each: TrainedRun) -> dict[str, Any]:
    """The settings, speed and machine of one run."""
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
    """A number of tokens in short form.

    >>> tokens(65536.0), tokens(2.5e6), tokens(float("inf"))
    ('66K', '2.5M', '∞')
    """
    if not abs(x) < 1e15:
        return number(x)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(x) >= size:
            return f"{x / size:.{1 if abs(x) < 10 * size else 0}f}{letter}".replace(".0", "")
    return f"{x:.0f}"
