"""Measure the errors of many specs on many captures, and store them in one Parquet file.

A row of the file is one spec on one layer of one capture, with the relative L2 error, cosine and
SQNR of every intermediate. Rows that the file already has are not computed again, so the same
command continues an interrupted sweep. Several commands may write to the same file at once.

examples:
  sagesim sweep out.parquet llama --all
  sagesim sweep out.parquet a.safetensors b.safetensors --specs sagebwd "sagebwd delta=p"

The command prints a ranking by the error of the gradients. It takes the geometric mean over layers
and captures for each of dQ, dK and dV, and then the root mean square of the three. If there are
many specs, it prints only the best one for each number of products in 8 bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.cli.cluster import add_cluster
from sagesim.cli.inputs import CAPTURE_HELP, GRAMMAR, load, parse_spec, path_of, require_writable
from sagesim.spec import PRESETS
from sagesim.terminal import Failure, progress, stdout, table

HELP: Final = "measure many specs on many captures, into a Parquet file; can be resumed"

_LONG: Final = 20
"""The largest number of specs that the ranking lists one by one."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "out", type=Path, metavar="OUT.parquet", help="a new file, or one to continue"
    )
    parser.add_argument(
        "captures",
        nargs="+",
        metavar="CAPTURE",
        help=CAPTURE_HELP,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--specs",
        nargs="+",
        default=list(PRESETS),
        metavar="LABEL",
        help="the specs to emulate; see below (default: every preset)",
    )
    which.add_argument(
        "--all",
        action="store_true",
        help="128 specs: sagebwd with each of the seven products in INT8 or 16 bit",
    )
    add_cluster(parser)
    parser.epilog = GRAMMAR


def run(args: argparse.Namespace) -> None:
    """Compute the missing rows and print the ranking."""
    labels: list[str] = args.specs
    specs = [parse_spec(label) for label in labels]
    names: list[str] = args.captures
    captures = {name: load(name) for name in names}
    if not args.dry_run:  # the check creates missing folders
        require_writable(args.out, inputs=map(path_of, names))

    from sagesim.analysis import GRADIENTS, TITLES
    from sagesim.experiments.spec_sweep import (
        best_per_int8_count,
        int8_or_16_bit,
        missing,
        ranking,
        sweep,
    )

    if args.all:
        specs = int8_or_16_bit()
    try:
        if args.dry_run:
            count, total, seconds = missing(args.out, specs, captures)
            time = "" if seconds is None else f", about {seconds / 3600:.2f} CPU hours"
            stdout().print(f"{count} of {total} rows to compute{time}; 0 GPU hours")
            return
        with progress("measuring specs") as bar:
            task = bar.add_task("")
            rows = sweep(
                args.out,
                specs,
                captures,
                cluster=args.cluster,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except (ValueError, ConnectionError) as error:
        raise Failure(str(error)) from None

    ranked = ranking(rows)
    title = "error of the gradients, best first"
    if len(ranked) > _LONG:
        title = "error of the gradients, best spec for each number of products in 8 bits"
        ranked = best_per_int8_count(ranked)
    shown = ("o", "ds", *GRADIENTS)
    best = table(title, "spec", "in 8 bits", *(TITLES[t] for t in shown), "gradients")
    for row in ranked:
        numbers = [f"{row[t]:.2e}" for t in (*shown, "gradients")]
        best.add_row(row["label"], str(row["int8"]), *numbers)
    console = stdout()
    console.print(best)
    console.print(f"{len(rows)} rows in {args.out}")
