"""Which specs are worth their bits? Many specs on many captures, into one Parquet file.

A row is one spec on one layer of one capture: relative L2, cosine and SQNR of every
intermediate. Rows that are there already (same label, tensors and layer) are not computed again,
so an interrupted sweep is continued by the same command.

  sagesim sweep out.parquet llama --all
  sagesim sweep out.parquet a.safetensors b.safetensors --specs sagebwd "sagebwd delta=p"

Prints a ranking by the error of the gradients: geometric means over layers and captures for each
of dQ, dK and dV, and the root mean square of the three. Of a long list, only the best for each
number of products in 8 bits is shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.cli.inputs import GRAMMAR, load, parse_spec
from sagesim.cli.terminal import Failure, progress, stdout, table
from sagesim.presets import PRESETS

HELP: Final = "many specs on many captures, into a Parquet file; resumable"

_LONG: Final = 20
"""Ranked specs above which only the best of their kind are shown."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("out", type=Path, metavar="OUT.parquet", help="new, or to be continued")
    parser.add_argument(
        "captures",
        nargs="+",
        metavar="CAPTURE",
        help="files made by `sagesim capture`, or the word llama",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--specs",
        nargs="+",
        default=list(PRESETS),
        metavar="LABEL",
        help="what to emulate; see the labels below (default: every preset)",
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="sagebwd with each of the seven products in INT8 or 16 bit: 128 specs",
    )
    parser.epilog = GRAMMAR


def run(args: argparse.Namespace) -> None:
    """Run what is missing, and print the ranking."""
    labels: list[str] = args.specs
    specs = [parse_spec(label) for label in labels]
    names: list[str] = args.captures
    captures = {name: load(name) for name in names}

    from sagesim.measure import GRADIENTS
    from sagesim.metrics import TITLES
    from sagesim.sweep import int8_or_16_bit, ranking, sweep

    if args.all:
        specs = int8_or_16_bit()
    try:
        with progress("measuring runs") as bar:
            task = bar.add_task("")
            rows = sweep(
                args.out,
                specs,
                captures,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except ValueError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"{args.out}: cannot be written: {error.strerror or error}") from None

    ranked = ranking(rows)
    title = "error of the gradients, best first"
    if len(ranked) > _LONG:
        title = "error of the gradients, best for each number of products in 8 bits"
        counts = {row["int8"] for row in ranked}
        ranked = [next(row for row in ranked if row["int8"] == count) for count in sorted(counts)]
    shown = ("o", "ds", *GRADIENTS)
    best = table(title, "spec", "in 8 bits", *(TITLES[t] for t in shown), "gradients")
    for row in ranked:
        numbers = [f"{row[t]:.2e}" for t in (*shown, "gradients")]
        best.add_row(row["label"], str(row["int8"]), *numbers)
    console = stdout()
    console.print(best)
    console.print(f"{len(rows)} runs in {args.out}")
