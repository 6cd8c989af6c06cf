"""Test whether your own kernel computes what a spec says.

The command draws calls with many shapes, masks, memory layouts and distributions of values. It runs
your function and the emulator on each call, forward and backward. If o, dq, dk, dv or the gradient
of sinks differs by more than docs/numerics.md allows, it looks for the smallest such call. It
prints the tensor, the size of the difference, the likely mistake or product, and a program that
reproduces the difference. It also reports a function that raises, or that writes to q, k, v or dO.

examples:
  sagesim fuzz my_kernels.attention:sage_attention --spec factored --device cuda
  sagesim fuzz my_kernels:forward_backward --head-sizes 64 128 --without gqa tails strides
  sagesim fuzz my_kernels:attention --with window padding

The function takes SDPA's arguments, fn(q, k, v, is_causal=..., scale=..., enable_gqa=...), with q
of shape [B, H, N, D], and supports autograd. With --with, it also takes window, causal_alignment,
key_mask, seqused_k, sinks and softcap, as sagesim.attention does. Its module must be installed or
in this folder.

The exit code is 0 if there is no difference, 1 if there is one, and 2 for invalid input.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sagesim.cli.inputs import add_spec, parse_spec
from sagesim.fuzzing import DTYPES, EXTRAS, FEATURES, HEAD_SIZES
from sagesim.terminal import Failure, progress

if TYPE_CHECKING:
    from rich.progress import TaskID

HELP: Final = "test whether your own kernel computes what a spec says"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("function", metavar="PACKAGE.MODULE:FUNCTION", help="the function to test")
    add_spec(parser)
    parser.add_argument(
        "--cases", type=int, default=500, metavar="N", help="number of calls (default: 500)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu or cuda (default: cpu)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        help="float32, float16, bfloat16 (default: all; on a CPU all but bfloat16)",
    )
    parser.add_argument(
        "--head-sizes",
        type=int,
        nargs="+",
        default=list(HEAD_SIZES),
        metavar="D",
        help=f"channels of a head (default: {' '.join(map(str, HEAD_SIZES))})",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="longest sequence (default: 2 1/3 times the spec's larger block)",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=FEATURES,
        metavar="WHAT",
        help="kinds of calls that the function does not support: "
        + "; ".join(f"{word} ({meaning})" for word, meaning in FEATURES.items()),
    )

    parser.add_argument(
        "--with",
        dest="extras",
        nargs="+",
        default=[],
        choices=EXTRAS,
        metavar="WHAT",
        help="arguments to draw that SDPA does not have: "
        + "; ".join(f"{word} ({meaning})" for word, meaning in EXTRAS.items()),
    )


def run(args: argparse.Namespace) -> int:
    """Fuzz, print the report, and return the exit code."""
    spec = parse_spec(args.spec)
    if not 0 <= args.seed < 2**63:
        raise Failure(f"--seed {args.seed} is not in 0..2**63-1")
    _check_device(args.device)
    function = _load(args.function)

    from sagesim.fuzzing import fuzz

    with progress("fuzzing") as bar:
        tasks: dict[str, TaskID] = {}

        def show(phase: str) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=None if tasks else args.cases)
                if len(tasks) > 1:
                    bar.console.print(f"{phase} ...")
            bar.advance(tasks[phase])

        try:
            report = fuzz(
                function,
                spec=spec,
                cases=args.cases,
                device=args.device,
                seed=args.seed,
                dtypes=args.dtypes,
                head_sizes=args.head_sizes,
                max_length=args.max_length,
                without=args.without,
                extras=args.extras,
                name=args.function,
                progress=show,
            )
        except ValueError as error:
            raise Failure(str(error)) from None
    print(report)
    return 0 if report.failure is None else 1


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise Failure(f"--device {name}: {str(error).splitlines()[0]}") from None


def _load(path: str) -> Any:
    """Import the function that "package.module:function" names."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise Failure(f"{path!r} is not of the form package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise Failure(f"{module} cannot be imported: {type(error).__name__}: {error}") from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Failure(f"{module} has no {name!r}") from None
    if not callable(found):
        raise Failure(f"{path} is of type {type(found).__name__}, not a function")
    return found
