"""`python -m sagesim_kernels.bench`: how fast and how accurate the kernels are on this GPU.

Our specs and the peers that are installed are timed in turns in one run, on bfloat16 inputs of
16384 tokens and 2048 channels in all: 512 to 32768 tokens, head sizes 64 and 128, causal and full;
forward, backward and both. Then what INT8 buys and costs at each of the seven sites, and every
error against float64. A time is the median of rounds, each from cold caches, with quantization and
all other preparation, without compilation and warm-up. Operations are counted for every contender
alike: 4 B H N^2 d for a forward, half of it under a causal mask, and 2.5 times that for a backward.

Each finished case is written at once, and the same command goes on where it was stopped. A record
is of one machine and one version of everything: another one is refused. Tables are printed, and
plots written beside the record where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from sagesim.cli.terminal import Failure, progress, stdout, table
from sagesim.spec import AttentionSpec
from sagesim_kernels.bench.cases import (
    PEERS,
    QUICK_PEERS,
    QUICK_SPECS,
    SPECS,
    Case,
    all_cases,
    quick_cases,
)
from sagesim_kernels.bench.record import Record, read
from sagesim_kernels.support import IS_INTERPRETED, supports

_ROUNDS: Final = 15
_QUICK_ROUNDS: Final = 7
_NEEDED: Final = ("rich", "safetensors")
"""What prints and what reads captures: missed before anything is run, and not when it is done."""

_PROGRAM: Final = "python -m sagesim_kernels.bench"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message} (see {_PROGRAM} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for wrong input or a device that is not there
    or no longer, 130 when interrupted."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        _run(_parser().parse_args(arguments), shlex.join([*_PROGRAM.split(), *arguments]))
    except Failure as failure:
        return _end(2, str(failure))
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        return _end(2, f"{error.name} is not installed: pip install 'sagebwd[bench]'")
    except KeyboardInterrupt:
        return _end(130, "interrupted; the same command goes on with the case it was at")
    return 0


def _end(code: int, message: str) -> int:
    print(f"sagesim_kernels.bench: {' '.join(message.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/bench.json"),
        metavar="FILE.json",
        help="the record, new or to be continued (default: %(default)s)",
    )
    parser.add_argument(
        "--specs",
        nargs="+",
        metavar="LABEL",
        help=f"what to time of ours (default: {' '.join(SPECS)})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="4096 tokens, causal, in about a minute; without FlexAttention and the sites one by "
        f"one, of {' and '.join(QUICK_SPECS)} if no --specs are given",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="of all cases those whose name matches, as 'speed*n8192' does the speeds at 8192 "
        "tokens; without it, the same command goes on with the others",
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="FILE.json",
        help="print the tables of a record and draw its plots, on any machine",
    )
    return parser


def _run(args: argparse.Namespace, command: str) -> None:
    if args.show is not None:
        try:
            _show(read(args.show), args.show)
        except (OSError, ValueError) as error:
            raise Failure(str(error)) from None
        return
    if not torch.cuda.is_available():
        raise Failure("no CUDA device here; --show FILE prints a record that was made on one")
    if IS_INTERPRETED:
        raise Failure("TRITON_INTERPRET is set, and the kernels would run on the CPU; unset it")
    specs = _labels(args.specs or (QUICK_SPECS if args.quick else SPECS))
    cases = _matching(args.only, quick_cases(specs) if args.quick else all_cases(specs))
    for package in _NEEDED:
        importlib.import_module(package)

    from sagesim_kernels.bench.cuda import CudaMeter
    from sagesim_kernels.bench.machine import describe
    from sagesim_kernels.bench.run import DeviceLost, Place, run

    rounds = _QUICK_ROUNDS if args.quick else _ROUNDS
    settings = {
        "specs": list(specs),
        "peers": list(QUICK_PEERS if args.quick else PEERS),
        "quick": args.quick,
        "dtype": "bfloat16",
        "rounds": rounds,
    }
    machine = describe()
    try:
        try:
            record = Record.open(args.out, machine=machine, settings=settings, command=command)
        except ValueError as error:
            raise Failure(str(error)) from None
        place = Place(torch.device("cuda"), torch.bfloat16, CudaMeter(), rounds)
        with progress("measuring cases") as bar:
            task = bar.add_task("", total=len(cases))

            def finished(case: Case, count: int) -> None:
                bar.update(task, completed=count)
                bar.console.print(f"{count} of {len(cases)}: {case.key}")

            run(cases, record, place, finished)
    except DeviceLost as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"{args.out}: cannot be written: {error.strerror or error}") from None
    _show(record.document, record.path)


def _matching(patterns: Sequence[str] | None, cases: Sequence[Case]) -> list[Case]:
    """The cases that a pattern names; all of them where none is asked for."""
    if patterns is None:
        return list(cases)
    for pattern in patterns:
        if not any(fnmatchcase(case.key, pattern) for case in cases):
            names = f"{cases[0].key!r} to {cases[-1].key!r}"
            raise Failure(f"--only {pattern!r} matches none of the cases {names}")
    return [case for case in cases if any(fnmatchcase(case.key, p) for p in patterns)]


def _labels(given: Sequence[str]) -> tuple[str, ...]:
    """The specs by their shortest labels, each once, none without a kernel."""
    labels: dict[str, None] = {}
    for label in given:
        try:
            spec = AttentionSpec.parse(label)
        except ValueError as error:
            raise Failure(str(error)) from None
        answer = supports(spec, dtype=torch.bfloat16)
        if not answer:
            raise Failure(f"no kernel for {label!r}: {answer}")
        labels[spec.label()] = None
    return tuple(labels)


def _show(document: dict[str, Any], path: Path) -> None:
    """Print the tables, and draw the plots beside the record."""
    from sagesim_kernels.bench.machine import one_line
    from sagesim_kernels.bench.tables import every_table

    console = stdout()
    for each in every_table(document):
        shown = table(each.title, *each.head)
        for row in each.rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(f"{len(document['cases'])} cases in {path}, on {one_line(document['machine'])}")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plots: matplotlib is not installed; pip install 'sagebwd[bench]'")
        return

    import matplotlib.pyplot as plt

    from sagesim_kernels.bench.plots import figures

    for name, figure in figures(document).items():
        file = path.with_name(f"{path.stem}_{name}.png")
        figure.savefig(file, dpi=150)
        plt.close(figure)
        console.print(f"{file}")
