"""Does my kernel compute what a spec says?

Draws calls of many shapes, masks, layouts and kinds of numbers, runs your function and the
emulator on each, forward and backward, and prints the smallest call on which o, dq, dk or dv leave
what docs/numerics.md allows: the tensor, how far out it is, the product that is to blame as far as
outputs tell, and a program that shows it.

  sagesim fuzz my_kernels.attention:sage_attention --spec factored --device cuda
  sagesim fuzz my_kernels:forward_backward --head-sizes 64 128 --without gqa tails strides

The function takes SDPA's arguments, fn(q, k, v, is_causal=..., scale=..., enable_gqa=...), with q
[B, H, N, D], and autograd differentiates it. Modules are looked for here and among those installed.

Exit code: 0 where no difference was found, 1 where one was, 2 for wrong input.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, Final

from sagesim._fuzz_cases import DTYPES, FEATURES, HEAD_SIZES
from sagesim.cli.inputs import add_spec, parse_spec
from sagesim.cli.terminal import Failure, progress

HELP: Final = "does your own kernel compute what a spec says"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("function", metavar="PACKAGE.MODULE:FUNCTION")
    add_spec(parser)
    parser.add_argument(
        "--cases", type=int, default=500, metavar="N", help="calls to draw (default: 500)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="DEVICE", help="cpu or cuda (default: cpu)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        help="float32 float16 bfloat16 (default: all; without bfloat16 on the cpu)",
    )
    parser.add_argument(
        "--head-sizes",
        type=int,
        nargs="+",
        default=list(HEAD_SIZES),
        metavar="D",
        help=f"(default: {' '.join(map(str, HEAD_SIZES))})",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="of a sequence (default: two and a third of the spec's larger block)",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=FEATURES,
        metavar="WHAT",
        help="calls that the function does not take: "
        + "; ".join(f"{word} ({meaning})" for word, meaning in FEATURES.items()),
    )


def run(args: argparse.Namespace) -> int:
    """Fuzz, print the report, and return the exit code."""
    spec = parse_spec(args.spec)
    if not 0 <= args.seed < 2**63:
        raise Failure("--seed has to be in 0..2**63-1")
    _check_device(args.device)
    function = _load(args.function)

    from sagesim._fuzz import fuzz

    with progress("comparing calls") as bar:
        task = bar.add_task("", total=args.cases)
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
                name=args.function,
                progress=lambda: bar.advance(task),
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
    """The function that "package.module:function" names."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise Failure(f"{path!r} is not of the form package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise Failure(f"{module} cannot be imported: {error}") from None
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Failure(f"{module} has no {name!r}") from None
    if not callable(found):
        raise Failure(f"{path} is a {type(found).__name__}, not a function")
    return found
