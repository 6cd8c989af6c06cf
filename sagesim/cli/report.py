"""What came of pretraining runs? Compare them in one HTML file.

Runs are sorted by what differs between them: settings such as tokens per step or QK-norm get a
figure each, attentions a line, seeds a band. Differences are taken from the run with sdpa, the
same setting and the same seed. RUN is a run's folder, its log.parquet, or a folder of runs.

  sagesim report runs --out report.html
  sagesim report runs/a runs/b results/c.parquet --margin 0.02
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim._atomic import replacing
from sagesim.cli.inputs import check_writable
from sagesim.cli.terminal import Failure, stdout, table

HELP: Final = "compare pretraining runs in one HTML file"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="made by `sagesim pretrain`"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="(default: report.html)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="NATS",
        help="a smaller difference of held-out losses is called none",
    )


def run(args: argparse.Namespace) -> None:
    """Write the report, and print the losses in the end."""
    from sagesim.experiments.pretrain.compare import Trained, difference, settings
    from sagesim.experiments.pretrain.page import render
    from sagesim.experiments.pretrain.runlog import Log
    from sagesim.experiments.pretrain.tables import with_error

    check_writable(args.out)
    try:
        runs = [Trained(name, Log.read(path)) for name, path in _logs(args.runs)]
        page = render(runs, margin=args.margin, command=args.command_line)
    except ValueError as error:
        raise Failure(str(error)) from None
    with replacing(args.out) as file:
        file.write_text(page, encoding="utf-8")
    losses = table("held-out loss in the end", "attention", "setting", "seeds", "loss", "from sdpa")
    for setting in settings(runs):
        for group in setting.groups:
            finals = list(group.finals.values())
            apart = difference(setting, group)
            losses.add_row(
                group.attention,
                setting.title,
                f"{len(finals)} of {len(group.runs)}",
                f"{sum(finals) / len(finals):.4f}" if finals else "",
                with_error(apart) if apart else "",
            )
    console = stdout()
    console.print(losses)
    console.print(f"report: {args.out}")


def _logs(paths: list[Path]) -> list[tuple[str, Path]]:
    """Names and paths of the logs that are meant."""
    found: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_dir() and not (path / "log.parquet").exists():
            inside = sorted([*path.glob("*/log.parquet"), *path.glob("*.parquet")])
            if not inside:
                raise Failure(f"{path}: neither a run nor a folder of runs")
            found += [(_name(each), each) for each in inside]
        else:
            found.append((_name(path), path))
    return found


def _name(path: Path) -> str:
    return path.parent.name if path.name == "log.parquet" else path.stem
