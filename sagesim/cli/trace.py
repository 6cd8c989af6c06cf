"""How far is each intermediate of attention from the exact one, layer by layer?

The paper's Table 2 for your own tensors: the emulator runs forward and backward under the spec
and every intermediate is compared with the same computation in float64.

  sagesim trace llama
  sagesim trace mine.safetensors --spec "sagebwd dp=int8" --layers 0 11

cosine 1 and rel L2 0 are exact. rel L2 is |error| / |exact|. Pooled over layers, cosine is the
mean and rel L2 the geometric mean, so that every layer counts alike.
"""

from __future__ import annotations

import argparse
from typing import Final

from sagesim.cli.inputs import add_capture, add_spec, load, parse_spec, select
from sagesim.cli.terminal import progress, stdout, table

HELP: Final = "how far each intermediate is from the exact one (the paper's Table 2)"

COLUMNS: Final = ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
"""The tensors of Table 2, in its order."""

PAPER_TABLE_2: Final = {
    "delta": (0.9973, 0.0736),
    "p": (0.9917, 0.1293),
    "dp": (1.0000, 0.0000),
    "ds": (0.9789, 0.2045),
    "o": (0.9969, 0.0793),
    "dq": (0.9664, 0.2579),
    "dk": (0.9537, 0.3074),
    "dv": (0.9985, 0.0540),
}
"""(cosine, relative L2) in layer 11 of their 325M model. Source: arXiv 2603.02170, Table 2."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_capture(parser)
    add_spec(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print the two tables."""
    spec = parse_spec(args.spec)
    calls = select(load(args.capture), args.layers)

    from sagesim.measure import errors, pool_errors
    from sagesim.metrics import TITLES

    with progress("measuring layers") as bar:
        measured = [errors(call, spec) for call in bar.track(calls)]
    pooled = pool_errors(measured)

    console = stdout()
    console.print(f"{args.capture} under {spec.label()}")
    for number, measure in enumerate(("cosine", "rel_l2")):
        rows = table(measure.replace("_l2", " L2"), "layer", *(TITLES[t] for t in COLUMNS))
        for call, by in zip(calls, measured, strict=True):
            rows.add_row(
                f"{call.index} {call.name}",
                *(f"{getattr(by[t], measure):.4f}" for t in COLUMNS),
            )
        rows.add_section()
        rows.add_row("pooled", *(f"{getattr(pooled[t], measure):.4f}" for t in COLUMNS))
        rows.add_row(
            "another model: layer 11 of the paper's",
            *(f"{PAPER_TABLE_2[t][number]:.4f}" for t in COLUMNS),
            style="dim",
        )
        console.print(rows)
