"""Record the attention problems of a trained model: q, k, v and dO of every layer.

From the newest checkpoint of a run, on the first held-out sequence, under exact attention.
`sagesim attribute`, `trace` and `sweep` take the file.

  sagesim pretrain capture runs/mine corpus mine.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.cli.inputs import check_writable
from sagesim.cli.terminal import Failure, stdout

HELP: Final = "record the attention problems of a trained model"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="with a checkpoint")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="that it was trained on")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    parser.add_argument(
        "--heads", type=int, nargs="+", metavar="N", help="only these heads (default: all)"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="only these layers (default: all)"
    )


def run(args: argparse.Namespace) -> None:
    """Record, and say what."""
    from sagesim.experiments.pretrain.corpus import Corpus
    from sagesim.experiments.pretrain.distributed import world
    from sagesim.experiments.pretrain.trained import captured

    check_writable(args.out)
    with world() as here:
        try:
            recorded = captured(
                args.folder, Corpus(args.corpus), here, heads=args.heads, layers=args.layers
            )
        except ValueError as error:
            raise Failure(str(error)) from None
    recorded.save(args.out)
    call = recorded.calls[0]
    stdout().print(
        f"{len(recorded.calls)} layers, {call.q.shape[1]} heads of {call.q.shape[2]} tokens "
        f"and {call.q.shape[3]} channels, in {args.out}"
    )
