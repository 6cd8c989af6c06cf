"""Statements of `theory.attention_bound`: the emulator, the errors of float32 included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from sagesim import AttentionSpec
from theory.attention_bound import attention_bound
from theory.checks.check import Check, bounded
from theory.checks.samples import Sample, captured, gaussian, outlier_channels

TOPIC = "attention_bound"
LABELS: Final = ("sagebwd", "factored", "factored_pv16", "fp8_gradients")
OUTPUTS: Final = ("o", "dq", "dk", "dv")


def checks() -> Iterator[Check]:
    """Every element of every output, for the specs that people train with."""
    causal = gaussian(1.0, 128, 64, is_causal=True)
    for sample in (gaussian(1.0, 128, 64), causal, outlier_channels(128), captured()[3]):
        for label in LABELS:
            for name, (bound, error) in bounds_and_errors(sample, label).items():
                statement = f"{label}: |error of {name}|"
                yield bounded(TOPIC, statement, sample.name, bound=bound, measured=error)


def bounds_and_errors(sample: Sample, label: str) -> dict[str, tuple[Tensor, Tensor]]:
    """By output: the bound, and |emulated - exact|, elementwise."""
    spec = AttentionSpec.parse(label)
    bound = attention_bound(sample, spec=spec)
    exact, trace = sample.exact(), sample.trace(spec)
    return {
        name: (getattr(bound, name), (getattr(trace, name) - getattr(exact, name)).abs())
        for name in OUTPUTS
    }
