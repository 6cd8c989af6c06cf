"""The numbers behind the explorer page: every choice of its switches, measured by the emulator.

Seven switches of three positions would be 2187 runs for each setting of the others. But an output
depends only on the products before it, so the products that nothing else reads (dV, dQ, dK) are
switched together, and PV is left out where delta does not come from O: 324 runs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import sagesim
from sagesim import FACTORED, SAGEBWD, SITES, AttentionSpec, Delta, Precision, Smoothing
from sagesim.attribution import OUTPUTS
from sagesim.metrics import TITLES
from theory.samples import Sample, captured, gaussian, outlier_channels

STATIC = Path(__file__).parent / "_static"

LEVELS = (Precision.INT8, Precision.FP8_E4M3, Precision.INPUT16)
SCALES = {"tile": SAGEBWD, "factored": FACTORED}
SMOOTHING = {
    "none": Smoothing(),
    "k": Smoothing(k=True),
    "q": Smoothing(q=True),
    "qk": Smoothing(q=True, k=True),
}

LAST = ("dv", "dq", "dk")
"""Products whose outcome no other product reads."""

READS = {
    Delta.FROM_O: {"ds": ("qk", "pv", "qk_recompute", "dp")},
    Delta.FROM_P: {"ds": ("qk", "qk_recompute", "dp")},
}
for _reads in READS.values():
    _reads |= {"o": ("qk", "pv"), "dv": ("qk", "qk_recompute", "dv")}
    _reads |= {t: (*_reads["ds"], t) for t in ("dq", "dk")}
"""The products that enter each output, by where delta comes from."""

PRODUCTS = {
    "qk": ("S = Q Kᵀ", "forward"),
    "pv": ("O = P V", "forward"),
    "qk_recompute": ("S = Q Kᵀ again", "backward"),
    "dv": ("dV = Pᵀ dO", "backward"),
    "dp": ("dP = dO Vᵀ", "backward"),
    "dq": ("dQ = dS K", "backward"),
    "dk": ("dK = dSᵀ Q", "backward"),
}

Errors = dict[str, list[float | None]]
"""By output, an error for each choice of the products that it reads, or None if not finite."""


def samples() -> dict[str, Sample]:
    """The inputs to choose from, by their word in an address."""
    found = {
        f"sigma{sigma}": replace(gaussian(sigma, tokens=256), name=f"\u03c3 = {sigma}")
        for sigma in (1, 3, 5, 10)
    }
    found["outliers"] = replace(outlier_channels(tokens=256), name="outliers")
    found["capture"] = replace(captured()[3], name="trained model")
    return found


def spec_of(
    levels: Mapping[str, Precision], *, scales: str, smoothing: str, delta: Delta
) -> AttentionSpec:
    """The spec that the switches say."""
    spec = replace(SCALES[scales], smoothing=SMOOTHING[smoothing], delta=delta)
    for site, level in levels.items():
        spec = sagesim.with_precision(spec, level, site)
    return spec


def _runs(delta: Delta) -> Iterator[dict[str, Precision]]:
    """Levels of the seven products that between them show all that outputs can depend on."""
    read = READS[delta]["ds"]
    for chosen in itertools.product(LEVELS, repeat=len(read)):
        for last in LEVELS:
            yield {"pv": last} | dict(zip(read, chosen, strict=True)) | dict.fromkeys(LAST, last)


def _index(levels: Mapping[str, Precision], read: Sequence[str]) -> int:
    """The place of a choice in an output's list: digits of base 3, the first the highest."""
    place = 0
    for site in read:
        place = place * len(LEVELS) + LEVELS.index(levels[site])
    return place


def measure(alike: Sequence[Sample], *, scales: str, smoothing: str, delta: Delta) -> list[Errors]:
    """The relative L2 errors of samples of one shape, which run as one batch."""
    sample = replace(
        alike[0], **{x: torch.cat([getattr(s, x) for s in alike]) for x in ("q", "k", "v", "do")}
    )
    exact = sample.exact()
    size = {t: getattr(exact, t).square().sum((1, 2, 3)) for t in OUTPUTS}
    found: list[Errors] = [
        {t: [None] * len(LEVELS) ** len(read) for t, read in READS[delta].items()} for _ in alike
    ]
    for levels in _runs(delta):
        trace = sample.trace(spec_of(levels, scales=scales, smoothing=smoothing, delta=delta))
        for t in OUTPUTS:
            off = (getattr(trace, t) - getattr(exact, t)).square().sum((1, 2, 3))
            place = _index(levels, READS[delta][t])
            for errors, value in zip(found, (off / size[t]).sqrt().tolist(), strict=True):
                errors[t][place] = float(f"{value:.4g}") if math.isfinite(value) else None
    return found


def _measure(task: tuple[Sequence[Sample], str, str, Delta]) -> list[Errors]:
    alike, scales, smoothing, delta = task
    return measure(alike, scales=scales, smoothing=smoothing, delta=delta)


def data(inputs: Mapping[str, Sample], *, processes: int = 1) -> dict[str, Any]:
    """All that the page shows; `errors` is keyed "input.scales.smoothing.delta"."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, sample in inputs.items():
        groups.setdefault((*sample.q.shape, sample.is_causal), []).append(name)
    settings = list(itertools.product(SCALES, SMOOTHING, Delta))
    keys = [(names, setting) for names in groups.values() for setting in settings]
    tasks = [([inputs[name] for name in names], *setting) for names, setting in keys]
    if processes == 1:
        measured = [_measure(task) for task in tasks]
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            measured = list(pool.map(_measure, tasks))
    return {
        "inputs": {name: sample.name for name, sample in inputs.items()},
        "levels": [level.value for level in LEVELS],
        "products": PRODUCTS,
        "outputs": {t: TITLES[t] for t in OUTPUTS},
        "reads": {delta.value: reads for delta, reads in READS.items()},
        "presets": {
            scales: {
                "levels": {site: spec.site(site).precision.value for site in SITES},
                "smoothing": next(w for w, s in SMOOTHING.items() if s == spec.smoothing),
                "delta": spec.delta.value,
            }
            for scales, spec in SCALES.items()
        },
        "errors": {
            ".".join((name, *setting)): errors
            for (names, setting), found in zip(keys, measured, strict=True)
            for name, errors in zip(names, found, strict=True)
        },
    }


def fragment(found: Mapping[str, Any]) -> str:
    """The explorer as HTML, for a page that has its script and style."""
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return (
        '<div id="ex"><noscript>The explorer needs JavaScript.</noscript></div>\n'
        f'<script type="application/json" id="ex-data">{text}</script>'
    )


def standalone(found: Mapping[str, Any]) -> str:
    """The explorer as a page of its own."""
    style, script = ((STATIC / f"explorer.{kind}").read_text() for kind in ("css", "js"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Explorer</title>'
        f"<style>{style}</style>{fragment(found)}<script>{script}</script></html>\n"
    )
