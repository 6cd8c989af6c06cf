"""Record the attention tensors of a trained model: q, k, v and dO of every layer.

The command loads the newest checkpoint of a run. It runs the model with 16-bit attention on the
first held-out sequence, forward and backward. `sagesim attribute`, `trace` and `sweep` read the
output file.

examples:
  sagesim pretrain capture runs/mine corpus mine.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from sagesim.cli.inputs import require_writable
from sagesim.terminal import Failure, stdout

HELP: Final = "record the attention tensors of a trained model"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="the corpus of the run")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="the file to write")
    parser.add_argument(
        "--heads", type=int, nargs="+", metavar="N", help="record only these heads (default: all)"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="record only these layers (default: all)"
    )


def run(args: argparse.Namespace) -> None:
    """Record the tensors and print their shape."""
    from sagesim.experiments.pretrain.run.distributed import join_processes
    from sagesim.experiments.pretrain.run.log import FILE
    from sagesim.experiments.pretrain.text.corpus import Corpus, check_shards
    from sagesim.experiments.pretrain.training.checkpoint import CHECKPOINTS
    from sagesim.experiments.pretrain.training.trained_model import capture_trained

    read = [args.folder / FILE, args.folder / CHECKPOINTS, args.corpus]
    require_writable(args.out, inputs=read)
    with join_processes() as world:
        try:
            corpus = Corpus(args.corpus)
            if world.is_first:
                check_shards(args.corpus)
            recorded = capture_trained(
                args.folder, corpus, world, heads=args.heads, layers=args.layers
            )
        except ValueError as error:
            raise Failure(str(error)) from None
    recorded.save(args.out)
    call = recorded.calls[0]
    stdout().print(
        f"{len(recorded.calls)} layers, {call.q.shape[1]} heads of {call.q.shape[2]} tokens "
        f"and {call.q.shape[3]} channels, in {args.out}"
    )
