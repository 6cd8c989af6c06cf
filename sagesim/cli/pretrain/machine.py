"""The arguments that say how runs are run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sagesim.experiments.pretrain.corpus import Corpus
    from sagesim.experiments.pretrain.settings import Machine


def add_machine(parser: argparse.ArgumentParser) -> None:
    """--micro-batch and its like. Each default is that of `Machine`."""
    group = parser.add_argument_group("how it is run (the numbers are the same up to rounding)")
    group.add_argument(
        "--micro-batch",
        type=int,
        default=8,
        metavar="N",
        help="sequences a process takes at a time (default: 8)",
    )
    group.add_argument("--compile", action="store_true", help="layers and loss by torch.compile")
    group.add_argument(
        "--fsdp", action="store_true", help="shard the weights over processes (FSDP2), no copies"
    )
    group.add_argument(
        "--any-order",
        action="store_true",
        help="allow algorithms that add up in an order that changes: faster, never the same bits",
    )
    group.add_argument(
        "--checkpoint-every", type=int, default=500, metavar="N", help="steps (default: 500)"
    )
    group.add_argument(
        "--tracker",
        default="none",
        metavar="NAME",
        help="send the numbers to tensorboard or trackio as well",
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """What the arguments say."""
    from sagesim.experiments.pretrain.settings import Machine

    return Machine(
        micro_batch=args.micro_batch,
        compile=args.compile,
        fsdp=args.fsdp,
        deterministic=not args.any_order,
        checkpoint_every=args.checkpoint_every,
        tracker=args.tracker,
    )


def padded_vocabulary(corpus: Corpus) -> int:
    """Rows of the embedding: a multiple of 64, as products of other sizes are slow on GPUs."""
    return -(-corpus.manifest.vocabulary // 64) * 64
