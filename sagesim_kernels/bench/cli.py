"""Measure how fast and how accurate the kernels are on this GPU, beside other attention.

The command times the forward, the backward and both together, of our specs and of the peers that
are installed. Inputs are bfloat16, with 16384 tokens and 2048 channels in all: sequences of 512 to
32768 tokens, head sizes 64 and 128, causal and full masks. Then it measures what INT8 saves and
costs in each of the seven products, and the errors of all results against float64. The part
"models" times factored_qk and fpa_bf16 at the shapes of models' attention, and "training" in a
training step of whole models. Both parts also time loops of calls, with the host's time included.
"masks" times factored_qk with sliding windows and padded keys.

A time is the median of several rounds. It includes quantization and all other preparation, starts
from cold caches, and excludes compilation and warm-up. The operations of a forward are 4 B H N^2 d,
half of that under a causal mask, and those of a backward 2.5 times as many, for every contender.

With --code the kernels are compiled for another GPU and assembled for this Hopper GPU. They are
timed beside FlashAttention-2 alone, which is mma.sync code too. The times are not the other GPU's.

The record is written after each case, and the same command continues it. A record belongs to one
machine and one version of all software; the command refuses to continue another one. At the end it
prints tables and, if matplotlib is installed, writes plots beside the record.
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

from sagesim.command import exit_code
from sagesim.files import replacing
from sagesim.spec import AttentionSpec
from sagesim.terminal import Failure, progress, stdout, table
from sagesim_kernels.bench.cases import (
    CODE_PEERS,
    CODE_SPECS,
    PEERS,
    QUICK_PEERS,
    QUICK_SPECS,
    SPECS,
    Case,
    all_cases,
    code_cases,
    quick_cases,
)
from sagesim_kernels.bench.record import Record, read
from sagesim_kernels.interpreter import IS_INTERPRETED
from sagesim_kernels.support import supports

_ROUNDS: Final = 15
_QUICK_ROUNDS: Final = 7
_NEEDED: Final = ("rich", "safetensors")
"""Packages that are imported before the first case, so that a missing one is reported at once."""

_PROGRAM: Final = "python -m sagesim_kernels.bench"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message} (see {_PROGRAM} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: the reader of a pipe closed it. 2: wrong input, a file that cannot be written, no
    CUDA device, or a device that failed. 130: interrupted.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)

    def command() -> None:
        try:
            _run(_parser().parse_args(arguments), shlex.join([*_PROGRAM.split(), *arguments]))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run the same command again to continue") from None

    return exit_code("sagesim_kernels.bench", command, dict.fromkeys(_NEEDED, "bench"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="the record to make or to continue (default: out/bench.json, or out/bench_sm80.json "
        "with --code sm80)",
    )
    parser.add_argument(
        "--specs",
        nargs="+",
        metavar="LABEL",
        help=f"our specs to time, except in models and training (default: {' '.join(SPECS)})",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        metavar="NAME",
        help="attention of other projects to time, except in models, masks and training (default: "
        f"{', '.join(map(repr, PEERS))})",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--quick",
        action="store_true",
        help="only 4096 tokens and the causal mask, without FlexAttention and without switching "
        f"single products; takes about a minute (default of --specs: {' '.join(QUICK_SPECS)})",
    )
    which.add_argument(
        "--code",
        metavar="sm80",
        help="only speed at 4096 and 8192 tokens, of the code of another GPU: sm80, sm86 or sm89 "
        f"(default of --specs: {' '.join(CODE_SPECS)})",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="only cases whose name matches a pattern: 'speed*n8192' times 8192 tokens, 'models*' "
        "the shapes of models; the same command without --only runs the other cases",
    )
    parser.add_argument(
        "--show",
        type=Path,
        metavar="FILE.json",
        help="print the tables of a record and draw its plots; needs no GPU",
    )
    return parser


def _run(args: argparse.Namespace, command: str) -> None:
    if args.show is not None:
        given = {
            "--out": args.out,
            "--specs": args.specs,
            "--peers": args.peers,
            "--quick": args.quick,
            "--code": args.code,
            "--only": args.only,
        }
        if ignored := [name for name, value in given.items() if value]:
            raise Failure(f"--show shows the whole record; it takes no {', '.join(ignored)}")
        try:
            document = read(args.show)
        except FileNotFoundError:
            raise Failure(f"{args.show}: no such file") from None
        except (OSError, ValueError) as error:
            raise Failure(str(error)) from None
        _show(document, args.show)
        return
    if args.quick:
        usual, known, make, rounds = QUICK_SPECS, QUICK_PEERS, quick_cases, _QUICK_ROUNDS
    elif args.code is not None:
        usual, known, make, rounds = CODE_SPECS, CODE_PEERS, code_cases, _ROUNDS
    else:
        usual, known, make, rounds = SPECS, PEERS, all_cases, _ROUNDS
    specs, peers = _labels(args.specs or usual), _peers(args.peers, known)
    cases = _matching(args.only, make(specs, peers))
    if not torch.cuda.is_available():
        raise Failure("no CUDA device; --show FILE.json prints a record without one")
    if IS_INTERPRETED:
        raise Failure("TRITON_INTERPRET is set, so the kernels would run on the CPU; unset it")
    for package in _NEEDED:
        importlib.import_module(package)
    if args.code is not None:
        _compile_for(args.code)

    from sagesim_kernels.bench.cuda import CudaMeter
    from sagesim_kernels.bench.machine import describe
    from sagesim_kernels.bench.run import DeviceLost, Setup, run
    from sagesim_kernels.bench.timing import SETTLING

    settings = {
        "specs": list(specs),
        "peers": list(peers),
        "quick": args.quick,
        "code": args.code,
        "dtype": "bfloat16",
        "rounds": rounds,
        "settling_s": SETTLING,
    }
    name = "bench.json" if args.code is None else f"bench_{args.code}.json"
    path = Path("out", name) if args.out is None else args.out
    machine = describe()
    try:
        try:
            record = Record.open(path, machine=machine, settings=settings, command=command)
        except (OSError, ValueError) as error:
            raise Failure(str(error)) from None
        setup = Setup(torch.device("cuda"), torch.bfloat16, CudaMeter(), rounds)
        with progress("measuring cases") as bar:
            task = bar.add_task("", total=len(cases))

            def on_done(case: Case, count: int) -> None:
                bar.update(task, completed=count)
                bar.console.print(f"{count} of {len(cases)}: {case.key}")

            run(cases, record, setup, on_done)
    except DeviceLost as error:
        raise Failure(str(error)) from None
    _show(record.document, record.path)


def _compile_for(code: str) -> None:
    from sagesim_kernels.bench.foreign_target import compile_for

    try:
        compile_for(code)
    except (RuntimeError, ValueError) as error:
        raise Failure(f"--code: {error}") from None


def _matching(patterns: Sequence[str] | None, cases: Sequence[Case]) -> list[Case]:
    """The cases whose name matches a pattern; all cases if patterns is None."""
    if patterns is None:
        return list(cases)
    for pattern in patterns:
        if not any(fnmatchcase(case.key, pattern) for case in cases):
            names = f"{cases[0].key!r} to {cases[-1].key!r}"
            parts = ", ".join(dict.fromkeys(case.key.partition(" ")[0] for case in cases))
            raise Failure(
                f"--only {pattern!r} matches none of the cases {names}; they begin with {parts}"
            )
    return [case for case in cases if any(fnmatchcase(case.key, p) for p in patterns)]


def _peers(given: Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """The given peers in the order of the known ones; all known ones if given is None."""
    for name in given or ():
        if name not in known:
            raise Failure(f"--peers {name!r}: the peers are {', '.join(map(repr, known))}")
    return tuple(name for name in known if given is None or name in given)


def _labels(given: Sequence[str]) -> tuple[str, ...]:
    """The shortest label of each spec, once.

    Raises:
        Failure: if a label is not a spec's, or if no kernel supports the spec.
    """
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
    """Write the plots of a record beside it, if matplotlib is installed, and print its tables."""
    from sagesim_kernels.bench.every_table import every_table
    from sagesim_kernels.bench.machine import one_line

    # Before the tables, because the reader of a pipe may stop reading in their middle.
    plots = _write_plots(document, path)
    console = stdout()
    for each in every_table(document):
        shown = table(each.title, *each.head)
        for row in each.rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(f"{len(document['cases'])} cases in {path}, on {one_line(document['machine'])}")
    if plots is None:
        console.print("no plots: matplotlib is not installed; pip install 'sagebwd[bench]'")
    for file in plots or ():
        console.print(f"{file}")


def _write_plots(document: dict[str, Any], record: Path) -> list[Path] | None:
    """Draw the plots of a record and return their files; None if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None

    import matplotlib.pyplot as plt

    from sagesim_kernels.bench.plots import figures

    files: list[Path] = []
    for name, figure in figures(document).items():
        file = record.with_name(f"{record.stem}_{name}.png")
        with replacing(file) as temporary:
            figure.savefig(temporary, format="png", dpi=150)
        plt.close(figure)
        files.append(file)
    return files
