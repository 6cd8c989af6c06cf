"""Compare pretraining runs in one HTML file.

Runs are grouped by the settings that differ between them, such as tokens per step or QK-norm. Each
setting gets its own charts. In a chart, each attention is a line, and the seeds form a band around
it. Differences are relative to the run with sdpa, the same setting and the same seed. RUN is a
run's folder, its log.parquet, or a folder of runs.

examples:
  sagesim report runs --out report.html
  sagesim report runs/a runs/b results/c.parquet --margin 0.02
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Final

from sagesim.cli.inputs import require_writable
from sagesim.files import write_text
from sagesim.terminal import Failure, stdout, table

HELP: Final = "compare pretraining runs in one HTML file"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run or folder of `sagesim pretrain`"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the HTML file to write (default: report.html)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="NATS",
        help="add verdicts: differences of held-out loss up to this margin do not count",
    )


def run(args: argparse.Namespace) -> None:
    """Write the report and print the final losses."""
    if args.margin is not None and not (math.isfinite(args.margin) and args.margin >= 0):
        raise Failure(f"--margin {args.margin} is not a finite number of at least 0")

    from sagesim.experiments.pretrain.report.compare import (
        difference,
        find_logs,
        group_runs,
        read_run,
    )
    from sagesim.experiments.pretrain.report.page import render
    from sagesim.experiments.pretrain.report.tables import with_error

    try:
        logs = find_logs(args.runs)
        require_writable(args.out, inputs=logs)
        runs = [read_run(log) for log in logs]
        page = render(runs, margin=args.margin, command=args.command_line)
    except ValueError as error:
        raise Failure(str(error)) from None
    write_text(args.out, page)
    losses = table("final held-out loss", "attention", "setting", "seeds", "loss", "from sdpa")
    for setting in group_runs(runs):
        for group in setting.groups:
            finals = list(group.finals.values())
            gap = difference(setting, group)
            losses.add_row(
                group.attention,
                setting.title,
                f"{len(finals)} of {len(group.runs)}",
                f"{sum(finals) / len(finals):.4f}" if finals else "",
                with_error(gap) if gap else "",
            )
    console = stdout()
    console.print(losses)
    console.print(f"report: {args.out}")
