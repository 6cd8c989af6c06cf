"""Measure how the errors grow with the standard deviation of Q and K, as in the paper's Table 1.

All tensors are Gaussian. Q and K have standard deviation sigma, V and dO have 1. Errors are pooled
over independent heads. The table shows our number, the paper's number, and the difference. The
paper does not say the length, head size, mask, blocks or number of draws; docs/paper.md compares
some choices. At large sigma the draws vary strongly, so use more of them there.

examples:
  sagesim sigma
  sagesim sigma --sigmas 1 3 --spec factored --tokens 1024 --causal
"""

from __future__ import annotations

import argparse
import math
from typing import Final

from sagesim.cli.inputs import add_spec, parse_spec
from sagesim.terminal import Failure, progress, stdout, table

HELP: Final = "measure errors by the standard deviation of Q and K (the paper's Table 1)"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--sigmas",
        type=float,
        nargs="+",
        default=[1.0, 3.0, 5.0, 8.0, 10.0],
        metavar="S",
        help="standard deviations of Q and K (default: the paper's, 1 3 5 8 10)",
    )
    add_spec(parser)
    for name, default, what in (
        ("--tokens", 2048, "number of queries and of keys"),
        ("--head-dim", 64, "channels of a head"),
        ("--draws", 16, "number of independent heads"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument("--causal", action="store_true", help="use a causal mask (default: none)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Measure the errors and print the table."""
    spec = parse_spec(args.spec)
    for sigma in args.sigmas:
        if not (math.isfinite(sigma) and sigma > 0):
            raise Failure(f"--sigmas: {sigma:g} is not a positive number")
        if sigma > 1e6:
            raise Failure(f"--sigmas: {sigma:g} is above 1e6; float32 logits could overflow")
    for name in ("tokens", "head_dim", "draws"):
        if not 1 <= (number := getattr(args, name)) <= 2**24:
            raise Failure(f"--{name.replace('_', '-')} {number} is not in 1..2**24")
    if not 0 <= args.seed < 2**32:
        raise Failure(f"--seed {args.seed} is not in 0..2**32-1")

    from sagesim.analysis import COLUMNS, PAPER_TABLE_1, TITLES, Setting, gaussian_errors

    setting = Setting(
        tokens=args.tokens,
        head_dim=args.head_dim,
        draws=args.draws,
        is_causal=args.causal,
        seed=args.seed,
    )
    with progress("measuring deviations") as bar:
        measured = [
            gaussian_errors(sigma, spec, setting).overall for sigma in bar.track(args.sigmas)
        ]

    ours_and_theirs = ("ours", "paper", "diff") * 2
    rows = table("cosine, then relative L2 error", "sigma", *ours_and_theirs)
    for sigma, errors in zip(args.sigmas, measured, strict=True):
        for number, t in enumerate(COLUMNS):
            cells: list[str] = []
            for measure_, ours in enumerate((errors[t].cosine, errors[t].rel_l2)):
                cells.append(f"{ours:.4f}")
                if sigma in PAPER_TABLE_1:
                    theirs = PAPER_TABLE_1[sigma][number][measure_]
                    cells += [f"{theirs:.4f}", f"{ours - theirs:+.4f}"]
                else:
                    cells += ["-", "-"]
            rows.add_row(f"{sigma:g} {TITLES[t]}", *cells)
        rows.add_section()
    console = stdout()
    mask = "causal" if args.causal else "full"
    console.print(
        f"{spec.label()}; tokens {args.tokens}, head size {args.head_dim}, draws {args.draws}, "
        f"{mask} mask, seed {args.seed}"
    )
    console.print(rows)
