"""The numbers of the explorer page: the errors of every combination of its choices.

Seven products with three precisions each would take 2187 emulations for each setting of the other
choices. But an output depends only on the products before it. No product reads the results of dV,
dQ and dK, so these three change together; and PV is left out if delta does not come from O. That
leaves 324 emulations.
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
from sagesim.analysis import OUTPUTS, TITLES
from sagesim.analysis.runs import Runs
from theory.checks.samples import Sample, captured, gaussian, outlier_channels

STATIC = Path(__file__).parents[1] / "_static"

REFERENCES = {"exact": "full precision", "own": "the exact gradient of its own forward"}

LEVELS = (Precision.INT8, Precision.FP8_E4M3, Precision.INPUT16)
SCALES = {"tile": SAGEBWD, "factored": FACTORED}
SMOOTHING = {
    "none": Smoothing(),
    "k": Smoothing(k=True),
    "q": Smoothing(q=True),
    "qk": Smoothing(q=True, k=True),
}

LAST = ("dv", "dq", "dk")
"""Products whose results no other product reads."""

READS = {
    Delta.FROM_O: {"ds": ("qk", "pv", "qk_recompute", "dp")},
    Delta.FROM_P: {"ds": ("qk", "qk_recompute", "dp")},
}
for _reads in READS.values():
    _reads |= {"o": ("qk", "pv"), "dv": ("qk", "qk_recompute", "dv")}
    _reads |= {t: (*_reads["ds"], t) for t in ("dq", "dk")}
"""The products that each output depends on, for each definition of delta."""

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
"""By output: the error for each choice of precisions that it depends on; None if not finite."""


def samples() -> dict[str, Sample]:
    """The inputs to choose from, by their name in the page's address."""
    found = {
        f"sigma{sigma}": replace(gaussian(sigma, tokens=128), name=f"\u03c3 = {sigma}")
        for sigma in (1, 3, 5, 10)
    }
    found["outliers"] = replace(outlier_channels(tokens=128), name="outliers")
    found["capture"] = replace(captured(256)[3], name="trained model")
    return found


def spec_of(
    levels: Mapping[str, Precision], *, scales: str, smoothing: str, delta: Delta
) -> AttentionSpec:
    """The spec of these choices."""
    spec = replace(SCALES[scales], smoothing=SMOOTHING[smoothing], delta=delta)
    for site, level in levels.items():
        spec = sagesim.with_precision(spec, level, site)
    return spec


def _runs(delta: Delta) -> Iterator[dict[str, Precision]]:
    """Precisions of the seven products; together these runs give every value of every output."""
    read = READS[delta]["ds"]
    for chosen in itertools.product(LEVELS, repeat=len(read)):
        for last in LEVELS:
            yield {"pv": last} | dict(zip(read, chosen, strict=True)) | dict.fromkeys(LAST, last)


def _index(levels: Mapping[str, Precision], read: Sequence[str]) -> int:
    """The index of a choice in an output's list: base 3, the first product most significant."""
    place = 0
    for site in read:
        place = place * len(LEVELS) + LEVELS.index(levels[site])
    return place


def measure(
    alike: Sequence[Sample], *, scales: str, smoothing: str, delta: Delta
) -> list[dict[str, Errors]]:
    """The relative L2 errors of samples of equal shape, which are computed as one batch.

    Returns: for each sample, its errors against each of `REFERENCES`.
    """
    sample = replace(
        alike[0], **{x: torch.cat([getattr(s, x) for s in alike]) for x in ("q", "k", "v", "do")}
    )
    runs = Runs(sample)
    whole = sample.exact()
    exact = {t: getattr(whole, t) for t in OUTPUTS}
    found: list[dict[str, Errors]] = [
        {
            name: {t: [None] * len(LEVELS) ** len(read) for t, read in READS[delta].items()}
            for name in REFERENCES
        }
        for _ in alike
    ]
    for levels in _runs(delta):
        spec = spec_of(levels, scales=scales, smoothing=smoothing, delta=delta)
        outputs = runs.outputs(spec)
        references = {"exact": exact, "own": runs.exact_backward(spec)}
        for t in OUTPUTS:
            place = _index(levels, READS[delta][t])
            if found[0]["exact"][t][place] is not None:  # the same for other precisions of `LAST`
                continue
            for name, reference in references.items():
                off = (outputs[t] - reference[t]).square().sum((1, 2, 3))
                relative = (off / reference[t].square().sum((1, 2, 3))).sqrt().tolist()
                for errors, value in zip(found, relative, strict=True):
                    finite = math.isfinite(value)
                    errors[name][t][place] = float(f"{value:.4g}") if finite else None
    return found


def _measure(task: tuple[Sequence[Sample], str, str, Delta]) -> list[dict[str, Errors]]:
    alike, scales, smoothing, delta = task
    return measure(alike, scales=scales, smoothing=smoothing, delta=delta)


def data(inputs: Mapping[str, Sample], *, processes: int = 1) -> dict[str, Any]:
    """All data of the page; keys of `errors` are "input.scales.smoothing.delta.reference"."""
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
        "references": REFERENCES,
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
            ".".join((name, *setting, reference)): errors
            for (names, setting), found in zip(keys, measured, strict=True)
            for name, by_reference in zip(names, found, strict=True)
            for reference, errors in by_reference.items()
        },
    }


def fragment(found: Mapping[str, Any]) -> str:
    """The explorer as HTML, for a page that loads its script and style."""
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return (
        '<div id="ex"><noscript>The explorer needs JavaScript.</noscript></div>\n'
        f'<script type="application/json" id="ex-data">{text}</script>'
    )


def standalone(found: Mapping[str, Any]) -> str:
    """The explorer as a complete HTML page."""
    style, script = ((STATIC / f"explorer.{kind}").read_text() for kind in ("css", "js"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Explorer</title>'
        f"<style>{style}</style>{fragment(found)}<script>{script}</script></html>\n"
    )
