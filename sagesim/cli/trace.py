"""Measure the error of each intermediate of attention by layer, as in the paper's Table 2.

The emulator runs forward and backward under the spec. Every intermediate is compared with the same
computation in float64. The third table compares with the exact gradients of the spec's own forward:
those for the P that its forward computed. It shows how well the backward fits the forward, and
leaves out how far both are from full precision. If much of an operand becomes 0 when it is rounded
to codes, a table gives the share by layer: of the numbers that are not 0, and, in brackets, of the
rows (tokens, queries) of which every code is 0.

examples:
  sagesim trace llama
  sagesim trace mine.safetensors --spec "sagebwd dp=int8" --layers 0 11

An exact tensor has cosine 1 and rel L2 0; rel L2 is |error| / |exact|. Pooled over layers, cosine
is a mean and rel L2 is a geometric mean, so that all layers have the same weight.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sagesim.cli.inputs import add_capture, add_spec, load, parse_spec, select
from sagesim.terminal import progress, stdout, table

if TYPE_CHECKING:
    from rich.table import Table

    from sagesim.analysis import Measured
    from sagesim.models import Call

_MANY_NUMBERS: Final = 0.05
_MANY_ROWS: Final = 0.001
"""Shares of an operand that become 0, from which on they are printed. Of normally distributed
numbers 1% or 2% do."""

HELP: Final = "measure the error of each intermediate (the paper's Table 2)"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_capture(parser)
    add_spec(parser)


def run(args: argparse.Namespace) -> None:
    """Measure the errors and print the tables."""
    spec = parse_spec(args.spec)
    calls = select(load(args.capture), args.layers)

    from sagesim.analysis import (
        TITLES,
        largest_losses,
        measure,
        pool_errors,
        range_warnings,
    )
    from sagesim.experiments.paper_table_2 import PAPER_TABLE_2

    with progress("measuring layers") as bar:
        found = [measure(call, spec) for call in bar.track(calls)]
    measured, own = [each.errors for each in found], [each.own for each in found]

    console = stdout()
    console.print(f"{args.capture} under {spec.label()}")
    tables = (
        ("cosine", "cosine", measured),
        ("rel L2", "rel_l2", measured),
        ("rel L2 against the exact gradients of its own forward", "rel_l2", own),
    )
    for number, (title, name, by_layer) in enumerate(tables):
        rows = table(title, "layer", *(TITLES[t] for t in PAPER_TABLE_2))
        pooled = pool_errors(by_layer)
        for call, by in zip(calls, by_layer, strict=True):
            rows.add_row(
                call.title,
                *(_number(getattr(by[t], name)) for t in PAPER_TABLE_2),
            )
        rows.add_section()
        rows.add_row("pooled", *(_number(getattr(pooled[t], name)) for t in PAPER_TABLE_2))
        if by_layer is measured:
            rows.add_row(
                "the paper's model, layer 11",
                *(f"{values[number]:.4f}" for values in PAPER_TABLE_2.values()),
                style="dim",
            )
        console.print(rows)
    if (zeros := _zeros(calls, found)) is not None:
        console.print(zeros)
    for call, by in zip(calls, measured, strict=True):
        if bad := [TITLES[t] for t in PAPER_TABLE_2 if not math.isfinite(by[t].rel_l2)]:
            console.print(f"layer {call.title}: the error of {', '.join(bad)} is not finite")
    losses = largest_losses(loss for each in found for loss in each.range_losses)
    for sentence in range_warnings(losses):
        console.print(sentence)


def _number(x: float) -> str:
    """Four decimals, unless that takes too many digits."""
    return f"{x:.4f}" if not 1e4 <= abs(x) < math.inf else f"{x:.1e}"


def _zeros(calls: Sequence[Call], found: Sequence[Measured]) -> Table | None:
    """The shares of operands that become 0 as codes; None if there are few zeros."""
    operands = [
        key
        for key in found[0].vanished
        if any(
            share.numbers >= _MANY_NUMBERS or share.rows >= _MANY_ROWS
            for share in (each.vanished[key] for each in found)
        )
    ]
    if not operands:
        return None
    rows = table("share rounded to 0", "layer", *operands)
    for call, each in zip(calls, found, strict=True):
        shares = [each.vanished[key] for key in operands]
        rows.add_row(
            call.title,
            *(
                f"{x.numbers:.1%} ({x.rows:.1%})" if x.rows >= _MANY_ROWS else f"{x.numbers:.1%}"
                for x in shares
            ),
        )
    return rows
